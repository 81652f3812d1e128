"""`flashinfer.testing.utils`: operands with a scale for each tile, and other names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer.testing
from flashinfer.testing import utils
from flashinfer.testing.utils import dequantize_fp8, quantize_fp8


@pytest.mark.parametrize("order", ["K", "MN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "tile"),
    [((6, 256), (1, 128)), ((256, 384), (128, 128)), ((2, 4, 96), (1, 2, 32)), ((3, 5), (3, 5))],
)
def test_there_and_back(shape: tuple, tile: tuple, dtype: torch.dtype, order: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[..., 0, :] *= 1000
    grid = [size // of_tile for size, of_tile in zip(shape, tile, strict=True)]
    scale_shape = grid if order == "K" else [*grid[:-2], grid[-1], grid[-2]]
    codes, scales = quantize_fp8(x, tuple(scale_shape), tile, order)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape
    assert scales.dtype == torch.float32 and list(scales.shape) == scale_shape
    assert scales.is_contiguous()
    back = dequantize_fp8(codes, scales, order)
    assert back.dtype == torch.float32
    for start in torch.cartesian_prod(*(torch.arange(n) for n in grid)).reshape(-1, len(grid)):
        place = tuple(slice(i * t, (i + 1) * t) for i, t in zip(start.tolist(), tile, strict=True))
        index = start.tolist()
        if order == "MN":
            index[-2:] = index[:-3:-1]
        largest = x[place].float().abs().max()
        assert torch.isclose(scales[tuple(index)], largest / 448)
        assert codes[place].float().abs().max() == 448
        # Half a unit of 3 bits of mantissa, or of the smallest number.
        bound = x[place].float().abs() / 16 + scales[tuple(index)] * 2.0**-10
        assert ((back[place] - x[place].float()).abs() <= bound * 1.001).all()


def test_zeros_have_a_scale() -> None:
    codes, scales = quantize_fp8(torch.zeros(2, 8), (2, 2), (1, 4), "K")
    assert (codes.float() == 0).all() and (scales > 0).all()
    assert (dequantize_fp8(codes, scales, "K") == 0).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.zeros(8)}, "x"),
        ({"x": torch.zeros(4, 9)}, "x"),
        ({"scale_shape": (4,)}, "scale_shape"),
        ({"scale_shape": (4, 0)}, "scale_shape"),
        ({"tile_shape": (1, 4, 1)}, "tile_shape"),
        ({"scale_major_mode": "N"}, "scale_major_mode"),
        ({"scale_major_mode": "MN"}, "x"),
    ],
)
def test_refusals(change: dict[str, Any], named: str) -> None:
    good = {
        "x": torch.zeros(4, 8),
        "scale_shape": (4, 2),
        "tile_shape": (1, 4),
        "scale_major_mode": "K",
    }
    with pytest.raises(ValueError, match=f"`{named}`"):
        quantize_fp8(**good | change)
    codes, scales = quantize_fp8(**good)
    with pytest.raises(ValueError, match="`x_scale`"):
        dequantize_fp8(codes, torch.ones(3, 2), "K")
    with pytest.raises(ValueError, match="`scale_major_mode`"):
        dequantize_fp8(codes, scales, "N")


def test_all_names_of_testing_are_there() -> None:
    names = [n for n in vars(flashinfer.testing) if callable(getattr(flashinfer.testing, n))]
    assert len(names) > 20
    for name in names:
        assert getattr(utils, name) is getattr(flashinfer.testing, name)
