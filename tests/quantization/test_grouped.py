"""Quantisation of matrices by groups: codes and scales are those of each matrix by itself.

On a GPU the kernels run. Without one the code around them runs: the functions that it calls for
each matrix are then computed by their references.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._common import checks
from flashinfer.quantization import (
    SfLayout,
    e2m1_and_ufp8sf_scale_to_float,
    mxfp8_dequantize_host,
    mxfp8_grouped_quantize,
    mxfp8_quantize,
    nvfp4_batched_quantize,
    nvfp4_quantize,
    scaled_fp4_grouped_quantize,
    silu_and_mul_nvfp4_quantize,
    silu_and_mul_scaled_nvfp4_experts_quantize,
)
from tests.bodies import body_of

pytestmark = pytest.mark.any_device
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATING = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(1, 1, 32), (3, 5, 96), (2, 128, 160), (2, 256, 64), (3, 130, 256), (4, 0, 32)]


@pytest.fixture(params=["host code", "reference"], autouse=True)
def call(request, monkeypatch) -> Iterator[Callable[..., Any]]:
    """Calls a public function: its own code, or without a GPU its reference instead."""
    if DEVICE == "cuda":
        if request.param == "reference":
            pytest.skip("the reference needs no GPU")
        yield lambda function, *arguments, **options: function(*arguments, **options)
        return
    monkeypatch.setattr(checks, "cuda_tensors", lambda **_: None)
    with flashinfer.reference_backend():
        own = body_of if request.param == "host code" else (lambda function: function)
        yield lambda function, *arguments, **options: own(function)(*arguments, **options)


def _backend() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if DEVICE == "cuda" else flashinfer.reference_backend()


def _matrices(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return (torch.randn(shape, device=DEVICE) * 3).to(dtype)


def _scales(count: int) -> torch.Tensor:
    return torch.linspace(0.7, 30.0, count, device=DEVICE)


def _counts(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Rows that count: none, all, more than there are, some."""
    torch.manual_seed(seed)
    counts = torch.randint(0, shape[1] + 1, shape[:1], dtype=torch.int32)
    if shape[0] > 1:
        counts[0], counts[-1] = (-1, shape[1] + 7) if seed else (shape[1], 0)
    return counts.to(DEVICE)


def _masked(a: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
    """The matrices with zeros in the rows that do not count."""
    found = []
    for matrix, count in zip(a, counts.tolist(), strict=True):
        kept = matrix.clone()
        kept[max(count, 0) :] = 0
        found.append(kept)
    return found


def _tile(sf: torch.Tensor, row: int, block: int, group: int) -> Any:
    """The scale of a block, by its place in the six dimensions of the documentation."""
    return sf[row % 32, row % 128 // 32, row // 128, block % 4, block // 4, group]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_matrix_of_a_batch(shape, dtype, call):
    a = _matrices(shape, dtype)
    for scale in (_scales(1), _scales(shape[0])):
        codes, sf = call(nvfp4_batched_quantize, a, scale)
        assert codes.shape == (*shape[:2], shape[2] // 2) and codes.is_contiguous()
        assert codes.dtype == sf.dtype == torch.uint8 and len(sf) == shape[0]
        for i in range(shape[0]):
            own = scale if scale.numel() == 1 else scale[i : i + 1]
            expected = nvfp4_quantize(a[i], own)
            assert torch.equal(codes[i], expected[0])
            assert torch.equal(sf[i], expected[1].flatten())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", ["plain", "gated", "mxfp8"])
def test_rows_that_count(function, shape, seed, call):
    dtype = FLOATING[seed]
    counts = _counts(shape, seed)
    wide = (*shape[:2], 2 * shape[2]) if function == "gated" else shape
    clean = _matrices(wide, dtype)
    a = clean.clone()
    for i, count in enumerate(counts.tolist()):
        a[i, max(count, 0) :] = float("nan")  # what does not count is not looked at
    scale = _scales(shape[0] if seed else 1)
    if function == "mxfp8":
        codes, sf = call(mxfp8_grouped_quantize, a, counts)
    elif function == "plain":
        codes, sf = call(scaled_fp4_grouped_quantize, a, counts, scale)
    else:
        codes, sf = call(silu_and_mul_scaled_nvfp4_experts_quantize, a, counts, scale)
    block = 32 if function == "mxfp8" else 16
    columns = -(-shape[2] // 128) * 128 if function == "mxfp8" else shape[2]
    tiles = -(-shape[1] // 128), -(-(columns // block) // 4)
    assert sf.shape == (32, 4, tiles[0], 4, tiles[1], shape[0])
    assert codes.shape == (shape[1], columns if block == 32 else columns // 2, shape[0])
    assert codes.permute(2, 0, 1).is_contiguous() and sf.permute(5, 2, 4, 0, 1, 3).is_contiguous()
    expected_dtypes = (torch.float8_e4m3fn, torch.uint8)
    assert (codes.dtype, sf.dtype) == (
        expected_dtypes if block == 32 else tuple(reversed(expected_dtypes))
    )
    for i, matrix in enumerate(_masked(clean, counts)):
        own = scale if scale.numel() == 1 else scale[i : i + 1]
        if function == "mxfp8":
            found = mxfp8_quantize(matrix, False, alignment=128)
        elif function == "plain":
            found = nvfp4_quantize(matrix, own, SfLayout.layout_linear)
        else:
            found = silu_and_mul_nvfp4_quantize(matrix, own, is_sf_swizzled_layout=False)
        assert torch.equal(codes[..., i].float(), found[0].float())
        linear = found[1].reshape(shape[1], columns // block)
        for row, column in ((0, 0), (shape[1] - 1, 0), (shape[1] // 2, linear.shape[1] - 1)):
            if shape[1]:
                place = sf.view(torch.uint8)
                assert _tile(place, row, column, i) == linear[row, column], (row, column)
        assert sf[..., i].float().sum() == linear.view(sf.dtype).float().sum()  # padding is zero


def test_values_come_back(call):
    """Against the numbers themselves: half of the widest step of the codes, in float64."""
    shape, counts = (3, 70, 128), torch.tensor([70, 3, 0], dtype=torch.int32, device=DEVICE)
    a = _matrices(shape, torch.float32)
    scale = torch.stack([448 * 6 / matrix.abs().max() for matrix in a])
    codes, sf = call(scaled_fp4_grouped_quantize, a, counts, scale)
    eight, exponents = call(mxfp8_grouped_quantize, a, counts)
    for i, wanted in enumerate(_masked(a.double(), counts)):
        tiles = sf[..., i].permute(2, 4, 0, 1, 3).reshape(128, -1).view(torch.uint8)
        with _backend():
            back = e2m1_and_ufp8sf_scale_to_float(codes[..., i].contiguous(), tiles, 1 / scale[i])
            tiles = exponents[..., i].permute(2, 4, 0, 1, 3).flatten()
            more = mxfp8_dequantize_host(eight[..., i].contiguous(), tiles.contiguous())
        largest = wanted.reshape(70, 8, 16).abs().amax(-1).repeat_interleave(16, 1)
        assert bool(((back - wanted).abs() <= 1.1 * largest / 6 + 1e-3).all())
        largest = wanted.reshape(70, 4, 32).abs().amax(-1).repeat_interleave(32, 1)
        assert bool(((more - wanted).abs() <= largest / 16 + 1e-6).all())


def test_refusals(call):
    a = _matrices((2, 4, 64), torch.bfloat16)
    mask, scale = torch.ones(2, dtype=torch.int32, device=DEVICE), _scales(2)
    for function in (scaled_fp4_grouped_quantize, silu_and_mul_scaled_nvfp4_experts_quantize):
        for name, arguments in {
            "a": (a[0], mask, scale),
            "a_global_sf": (a, mask, _scales(3)),
            "mask": (a, mask[:1], scale),
        }.items():
            with pytest.raises(ValueError, match=f"`{name}`"):
                call(function, *arguments)
        for wrong in (a[..., :24].contiguous(), a.double()):
            with pytest.raises(ValueError, match="`a`|hidden_size"):
                call(function, wrong, mask, scale)
        with pytest.raises((TypeError, ValueError), match="nvfp4_4over6"):
            call(function, a, mask, scale, nvfp4_4over6=True)
        with pytest.raises((TypeError, ValueError), match="`mask`"):
            call(function, a, mask.float(), scale)
    with pytest.raises((TypeError, ValueError), match="sf_vec_size"):
        call(nvfp4_batched_quantize, a, scale, 32)
    with pytest.raises((TypeError, ValueError), match="backend"):
        call(mxfp8_grouped_quantize, a, mask, backend="cuda")
