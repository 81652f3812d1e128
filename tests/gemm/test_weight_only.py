"""Weights of 4 and 8 bits, and the routers' products, against sums in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashinfer import dsv3_ops, gemm
from flashinfer.gemm import _weight_kernels
from flashinfer.gemm._weight_kernels import choose_weight_config, is_aligned, shared_bytes

BF16, HALF = torch.bfloat16, torch.float16
SHAPES = [(1, 8, 256), (5, 264, 1024), (17, 136, 1952), (40, 72, 320), (130, 648, 512)]
# Of products that stream: m, n, k, and the columns, warps and parts of k that 132 SMs take; not
# all stages and tiles are whole.
STREAMS = [
    (1, 136, 1280, 32, 8, 1),
    (8, 1000, 2304, 32, 8, 1),
    (3, 8456, 1280, 64, 8, 1),
    (8, 16904, 768, 128, 8, 1),
    (5, 33800, 768, 0, 8, 1),
    (7, 1000, 6656, 32, 8, 2),
    (9, 136, 256, 32, 16, 1),
    (16, 6152, 1792, 64, 8, 1),
    (31, 4104, 1280, 64, 8, 1),
    (13, 8456, 1280, 64, 8, 1),
    (41, 4104, 1280, 64, 8, 1),
    (16, 16904, 768, 128, 8, 1),
    (15, 2000, 6656, 32, 16, 2),
]
# Formats that stream, with the elements of k whose scales take 16 bytes, or a step of k.
STREAM_UNITS = {("int4", 128): 1024, ("int4", 0): 256, ("mxfp4", 32): 512, ("nvfp4", 16): 256}
FORMATS = [("int4", 128), ("int4", 32), ("int4", 0), ("int8", 0), ("int8", 64)]
FORMATS += [("mxfp4", 32), ("nvfp4", 16)]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
ROUTERS = [
    ("mm_M1_16_K7168_N128", BF16),
    ("mm_M1_16_K7168_N256", torch.float32),
    ("mm_M1_16_K7168_N256_bf16", BF16),
    ("mm_M1_16_K6144_N256", torch.float32),
    ("mm_M1_16_K7168_N384", torch.float32),
    ("mm_M1_16_K7168_N384_bf16", BF16),
    ("mm_M1_16_K7168_N896", torch.float32),
    ("mm_M1_16_K7168_N896_bf16", BF16),
]


def _fits(weight_format: str, group: int, k: int) -> bool:
    return group == 0 or k % group == 0


def _cases() -> Iterator[tuple[str, int, tuple[int, int, int], torch.dtype]]:
    for weight_format, group in FORMATS:
        for shape in SHAPES:
            for dtype in (BF16, HALF):
                if _fits(weight_format, group, shape[2]):
                    yield weight_format, group, shape, dtype


def _scale_dtype(weight_format: str, dtype: torch.dtype) -> torch.dtype:
    return {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}.get(weight_format, dtype)


def _scale_shape(group: int, n: int, k: int) -> tuple[int, ...]:
    return (n, k // group) if group else (n,)


def _weights(
    weight_format: str, group: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and their values in float64."""
    if weight_format == "int8":
        codes = torch.randint(-128, 128, (n, k), device=device, dtype=torch.int8)
        values = codes.double()
    else:
        codes = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
        numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
        table = torch.tensor(E2M1, dtype=torch.float64, device=device)
        is_integer = weight_format == "int4"
        values = (numbers - 16 * (numbers > 7)).double() if is_integer else table[numbers]
    shape = _scale_shape(group, n, k)
    if weight_format == "mxfp4":
        scale = torch.randint(120, 130, shape, device=device, dtype=torch.uint8)
        factors = torch.exp2(scale.double() - 127)
    else:
        scale = (torch.rand(shape, device=device) + 0.1).to(_scale_dtype(weight_format, dtype))
        factors = scale.double()
    return codes, scale, values * factors.view(n, -1).repeat_interleave(group or k, 1)


def _assert_near(out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Within rounding to `out` and the float32 sums."""
    bound = torch.finfo(out.dtype).eps * expected.abs() + 2.0**-15 * magnitude
    assert out.shape == expected.shape
    assert bool(((out.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize(("weight_format", "group", "shape", "dtype"), list(_cases()), ids=str)
def test_weights(
    weight_format: str,
    group: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    m, n, k = shape
    codes, scale, values = _weights(weight_format, group, n, k, dtype, device)
    around = torch.full((m + 2, k), float("nan"), dtype=dtype, device=device)
    x = around[1 : m + 1]
    x.normal_()
    alpha = torch.tensor([0.5], device=device)
    bias = torch.randn(n, device=device).to(dtype)
    out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
    returned = gemm.weight_only_linear(x, codes, scale, weight_format, alpha, bias, out)
    assert returned is out
    expected = 0.5 * x.double() @ values.T + bias.double()
    magnitude = 0.5 * x.double().abs() @ values.abs().T + bias.double().abs()
    _assert_near(out, expected, magnitude)
    again = gemm.weight_only_linear(x, codes, scale, weight_format, alpha, bias)
    assert torch.equal(again, out)


@pytest.mark.parametrize("shape", STREAMS, ids=str)
@pytest.mark.parametrize(("weight_format", "group"), list(STREAM_UNITS), ids=str)
def test_streams(
    weight_format: str, group: int, shape: tuple[int, ...], device: torch.device
) -> None:
    """Every kind of tile; repeats have the same bits."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a Hopper GPU")
    m, n, k, *tile = shape
    unit = STREAM_UNITS[weight_format, group]
    k = -(-k // unit) * unit
    codes, scale, values = _weights(weight_format, group, n, k, BF16, device)
    common = (device, BF16, BF16, weight_format, scale.dtype, group, m, n, k)
    config = choose_weight_config(*common, aligned=is_aligned(scale))
    assert config.streams
    if torch.cuda.get_device_properties(device).multi_processor_count == 132:
        assert [config.columns, config.warps, config.splits] == tile
    x = torch.randn(m, k, device=device).to(BF16)
    bias = torch.randn(n, device=device).to(BF16)
    out = torch.full((m, n), float("nan"), dtype=BF16, device=device)
    gemm.weight_only_linear(x, codes, scale, weight_format, bias=bias, out=out)
    expected = x.double() @ values.T + bias.double()
    _assert_near(out, expected, x.double().abs() @ values.abs().T + bias.double().abs())
    for _ in range(10):
        again = gemm.weight_only_linear(x, codes, scale, weight_format, bias=bias)
        assert torch.equal(again, out)


@pytest.mark.parametrize("shape", [(8, 256), (136, 512)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, HALF], ids=str)
def test_extreme_scales(dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    """MXFP4's scales go beyond the range of 16 bits; the float32 sums take them."""
    n, k = shape
    codes = torch.full((n, k // 2), 0x22, dtype=torch.uint8, device=device)  # ones
    x = torch.ones(2, k, dtype=dtype, device=device)
    for exponent in (-100, -40, 40, 100):
        scale = torch.full((n, k // 32), 127 + exponent, dtype=torch.uint8, device=device)
        alpha = torch.tensor([2.0**-exponent], device=device)
        out = gemm.weight_only_linear(x, codes, scale, "mxfp4", alpha)
        assert bool((out == k).all())


@pytest.mark.parametrize(("name", "dtype"), ROUTERS, ids=str)
def test_routers(name: str, dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("needs a Hopper GPU")
    k, n = (int(part[1:]) for part in name.removesuffix("_bf16").split("_")[3:])
    weight = torch.randn(n, k, device=device).to(BF16)
    for m in (1, 7, 16):
        x = torch.randn(m, k, device=device).to(BF16)
        out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
        getattr(dsv3_ops, name)(x, weight.T, out)
        left, right = x.double(), weight.double().T
        _assert_near(out, left @ right, left.abs() @ right.abs())
    with pytest.raises(ValueError, match="`mat_a` must have shape"):
        getattr(dsv3_ops, name)(weight[:17], weight.T, out)


@pytest.mark.parametrize(
    ("kib", "capability"), [(99, (8, 9)), (163, (8, 0)), (227, (9, 0)), (99, (12, 0))]
)
def test_the_choice_fits_the_gpu(
    kib: int, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {
        "get_shared_bytes_per_block_optin": kib << 10,
        "get_compute_capability": capability,
        "get_device_sm_count": 100,
    }
    for name, value in known.items():
        monkeypatch.setattr(_weight_kernels, name, lambda device, value=value: value)
    choose = choose_weight_config.__wrapped__
    for weights in ("plain", "int8", "int4"):
        for rows in (1, 16, 40, 500):
            config = choose(torch.device("cpu"), BF16, BF16, weights, BF16, 0, rows, 4096, 4096)
            assert shared_bytes(weights, config.tokens, config.warps) <= kib << 10
            assert config.splits == 1 or capability[0] >= 9
            assert config.tokens >= min(rows, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_format": "int3"}, "`weight_format` must be 'int4'"),
        ({"input": torch.zeros(2, 256)}, "`input` must have dtype float16 or bfloat16|bfloat16 or"),
        ({"weight": torch.zeros(8, 64, dtype=torch.uint8)}, r"`weight` must have shape \[n, 128\]"),
        ({"weight": torch.zeros(8, 128, dtype=torch.int8)}, "`weight` must have dtype uint8"),
        ({"weight_scale": torch.zeros(8, 3, dtype=BF16)}, "`weight_scale` must have shape"),
        ({"weight_scale": torch.zeros(8, 2, dtype=HALF)}, "`weight_scale` must have dtype"),
        ({"alpha": torch.zeros(2)}, "`alpha` must have one element"),
        ({"out": torch.zeros(2, 9, dtype=BF16)}, "`out` must have shape"),
        ({"input": torch.zeros(2, 240, dtype=BF16)}, "a multiple of 32"),
    ],
)
def test_refusals(change: dict[str, Any], message: str, device: torch.device) -> None:
    good = {
        "input": torch.zeros(2, 256, dtype=BF16),
        "weight": torch.zeros(8, 128, dtype=torch.uint8),
        "weight_scale": torch.zeros(8, 2, dtype=BF16),
        "weight_format": "int4",
    }
    given = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in {**good, **change}.items()
    }
    with pytest.raises((ValueError, TypeError), match=message):
        gemm.weight_only_linear(**given)
