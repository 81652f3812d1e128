"""Products of 8-bit matrices with scales: results in float64, layouts, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.gemm import bmm_fp8, fp8_blockscale_gemm_sm90

pytestmark = pytest.mark.usefixtures("hopper")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _codes(*shape: int, device: torch.device, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _scales(*shape: int, device: torch.device) -> torch.Tensor:
    """Powers of two that differ: a scale that is read from another place shows."""
    return torch.exp2(torch.randint(-3, 4, shape, device=device).float())


def _assert_near(out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Within rounding to `out` and the 14 bits in which Hopper's tensor cores sum 8-bit products.

    `magnitude` is the product of the absolute values.
    """
    bound = torch.finfo(out.dtype).eps * expected.abs() + 2.0**-12 * magnitude
    assert out.shape == expected.shape
    assert bool(((out.double() - expected).abs() <= bound).all())


# ---- one scale per operand ---------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 16, 16), (3, 5, 80, 144), (2, 130, 256, 512)], ids=str)
@pytest.mark.parametrize("backend", ["cublas", "cudnn"])
def test_batched_product(
    shape: tuple[int, ...], dtypes: Any, backend: str, device: torch.device
) -> None:
    b, m, n, k = shape
    A = _codes(b, m, k, device=device, dtype=dtypes[0])
    B = _codes(b, n, k, device=device, dtype=dtypes[1]).transpose(1, 2)
    factors = torch.tensor([0.5, 3.0], device=device)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.full((b, m, n), float("nan"), dtype=dtype, device=device)
        returned = bmm_fp8(A, B, factors[:1], factors[1], dtype, out=out, backend=backend)
        assert returned is out
        _assert_near(out, 1.5 * A.double() @ B.double(), 1.5 * A.double().abs() @ B.double().abs())
        chosen = bmm_fp8(A, B, factors[:1], factors[1], dtype, backend="auto")
        assert backend == "cudnn" or torch.equal(out, chosen)


def test_batched_product_of_nothing(device: torch.device) -> None:
    one = torch.ones(1, device=device)
    for b, m in ((0, 3), (2, 0)):
        A, B = _codes(b, m, 32, device=device), _codes(b, 16, 32, device=device).transpose(1, 2)
        for backend in ("cublas", "cudnn"):
            assert bmm_fp8(A, B, one, one, torch.bfloat16, backend=backend).shape == (b, m, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A": torch.zeros(2, 3, 32, dtype=torch.bfloat16)}, "`A` must have dtype float8_e4m3fn"),
        ({"A": torch.zeros(3, 32, dtype=E4M3)}, "`A` must have 3 dimensions"),
        ({"A": torch.zeros(2, 3, 48, dtype=E4M3)}, "`B` must have shape"),
        ({"B": torch.zeros(2, 32, 16, dtype=E4M3)}, "`B` must be column-major"),
        ({"B": torch.zeros(2, 18, 32, dtype=E4M3).mT}, "multiples of 16"),
        ({"A_scale": torch.ones(2)}, "`A_scale` must have one element"),
        ({"B_scale": torch.ones(1, dtype=torch.float64)}, "`B_scale` must have dtype float32"),
        ({"B_scale": 1.0}, "`B_scale` must be a torch.Tensor"),
        ({"dtype": torch.float32}, "`dtype` must have dtype bfloat16 or float16"),
        ({"dtype": "bfloat16"}, "`dtype` must be a torch.dtype"),
        ({"out": torch.zeros(2, 3, 15, dtype=torch.bfloat16)}, "`out` must have shape"),
        ({"out": torch.zeros(2, 3, 16, dtype=torch.float16)}, "`out` must have dtype bfloat16"),
        ({"out": torch.zeros(2, 16, 3, dtype=torch.bfloat16).mT}, "`out` must be contiguous"),
        (
            {"backend": "cutlass"},
            "does not support backend 'cutlass': .* 'cublas', 'cudnn', 'auto'",
        ),
    ],
)
def test_batched_refusals(change: dict[str, Any], message: str, device: torch.device) -> None:
    good = {
        "A": torch.zeros(2, 3, 32, dtype=E4M3),
        "B": torch.zeros(2, 16, 32, dtype=E4M3).mT,
        "A_scale": torch.ones(1),
        "B_scale": torch.ones(1),
    }
    given = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in {**good, "dtype": torch.bfloat16, **change}.items()
    }
    with pytest.raises((ValueError, TypeError), match=message):
        bmm_fp8(**given)


def test_batched_refuses_two_wide_formats(device: torch.device) -> None:
    A = _codes(1, 3, 32, device=device, dtype=E5M2)
    one = torch.ones(1, device=device)
    with pytest.raises(ValueError, match="`A` or `B` must have dtype float8_e4m3fn"):
        bmm_fp8(A, A.new_empty(1, 16, 32).mT, one, one, torch.bfloat16)


# ---- scales of blocks --------------------------------------------------------------------------


def _values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows = scale.double().repeat_interleave(128, dim=1)
    if scale.shape[0] != codes.shape[0]:
        rows = rows.repeat_interleave(128, dim=0)[: codes.shape[0]]
    return codes.double() * rows


def _layout(scale: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "rows":
        return scale
    if layout == "columns":
        return scale.t().contiguous().t()
    padded = scale.new_full((scale.shape[1], scale.shape[0] + 3), float("nan"))
    padded[:, : scale.shape[0]] = scale.t()
    return padded[:, : scale.shape[0]].t()


@pytest.mark.parametrize("weight_scales", ["blocks", "rows"])
@pytest.mark.parametrize("layout", ["rows", "columns", "padded columns"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 256, 512),
        (4, 256, 512),
        (7, 192, 1024),
        (33, 16, 128),
        (130, 1024, 768),
        (260, 400, 1536),  # both layouts are boxes, and the last ones are not whole
    ],
    ids=str,
)
def test_block_scales(
    shape: tuple[int, ...], layout: str, weight_scales: str, device: torch.device
) -> None:
    m, n, k = shape
    x, w = _codes(m, k, device=device), _codes(n, k, device=device)
    x_scale = _scales(m, k // 128, device=device)
    w_scale = _scales(n if weight_scales == "rows" else -(-n // 128), k // 128, device=device)
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)
    returned = fp8_blockscale_gemm_sm90(
        x, w, _layout(x_scale, layout), _layout(w_scale, layout), out, torch.bfloat16
    )
    assert returned is out
    left, right = _values(x, x_scale), _values(w, w_scale).T
    _assert_near(out, left @ right, left.abs() @ right.abs())


@pytest.mark.parametrize("weight_dtype", [E4M3, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 5, 64])
def test_operands_that_are_quantised_here(
    m: int, weight_dtype: torch.dtype, device: torch.device
) -> None:
    from flashinfer.quantization import per_token_group_quant_8bit

    x = torch.randn(m, 384, dtype=torch.bfloat16, device=device)
    w = torch.randn(208, 384, device=device).to(weight_dtype)
    w_scale = None if weight_dtype == torch.bfloat16 else _scales(2, 3, device=device)
    left = _values(*per_token_group_quant_8bit(x, 128))
    right = _values(*(per_token_group_quant_8bit(w, 128) if w_scale is None else (w, w_scale))).T
    out = fp8_blockscale_gemm_sm90(x, w, weight_scale=w_scale)
    assert out.dtype == torch.bfloat16
    _assert_near(out, left @ right, left.abs() @ right.abs())


def test_block_scales_of_no_rows(device: torch.device) -> None:
    x = torch.empty(0, 256, dtype=torch.bfloat16, device=device)
    w, scale = _codes(32, 256, device=device), torch.ones(1, 2, device=device)
    assert fp8_blockscale_gemm_sm90(x, w, weight_scale=scale).shape == (0, 32)


# Beginnings of the messages are what callers of FlashInfer match.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": torch.zeros(4, 127, dtype=torch.bfloat16)}, "`weight` must have shape"),
        (
            {
                "input": torch.zeros(4, 127, dtype=torch.bfloat16),
                "weight": torch.zeros(32, 127, dtype=torch.bfloat16),
                "input_scale": None,
            },
            "divisible by block size",
        ),
        ({"input": torch.zeros(4, 256, dtype=torch.float16)}, "FP8.*or BF16"),
        ({"weight_scale": None}, "weight_scale is required when weight is FP8"),
        ({"input_scale": None}, "input_scale is required when input is FP8"),
        (
            {"input": torch.zeros(4, 256, dtype=torch.bfloat16)},
            "input_scale should not be provided for BF16",
        ),
        (
            {"weight": torch.zeros(32, 256, dtype=torch.bfloat16), "weight_scale": None},
            "FP8 input.*BF16 weight.*not supported",
        ),
        ({"input_scale": torch.ones(2, 4)}, "pass input_scale.T"),
        ({"input_scale": torch.ones(4, 4)}, "input_scale shape mismatch"),
        ({"input_scale": torch.ones(4, 2, dtype=torch.bfloat16)}, "input_scale must be float32"),
        ({"weight_scale": torch.ones(2, 2)}, "weight_scale shape mismatch"),
        ({"weight_scale": torch.ones(1, 2, dtype=torch.half)}, "weight_scale must be float32"),
        ({"weight": torch.zeros(24, 256, dtype=E4M3)}, "`weight` must have an n"),
        ({"weight": torch.zeros(256, 32, dtype=E4M3).T}, "`weight` must be a contiguous matrix"),
        ({"out": torch.zeros(4, 32)}, "`out` must have dtype bfloat16"),
        ({"out": torch.zeros(4, 16, dtype=torch.bfloat16)}, "`out` must have shape"),
        ({"out_dtype": torch.float32}, "`out_dtype` must have dtype bfloat16"),
        ({"input": None}, "`input` must be a torch.Tensor"),
    ],
)
def test_block_scale_refusals(change: dict[str, Any], message: str, device: torch.device) -> None:
    good = {
        "input": torch.zeros(4, 256, dtype=E4M3),
        "weight": torch.zeros(32, 256, dtype=E4M3),
        "input_scale": torch.ones(4, 2),
        "weight_scale": torch.ones(1, 2),
    }
    given = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in {**good, **change}.items()
    }
    with pytest.raises((ValueError, TypeError), match=message):
        fp8_blockscale_gemm_sm90(**given)


def test_what_the_products_run_on() -> None:
    assert fp8_blockscale_gemm_sm90.is_compute_capability_supported(90)
    assert not fp8_blockscale_gemm_sm90.is_compute_capability_supported(100)
    assert flashinfer.bmm_fp8.is_backend_supported("cublas", 90)
    assert not flashinfer.bmm_fp8.is_backend_supported("cublas", 80)
    assert flashinfer.bmm_fp8.is_backend_supported("cudnn", 90)
    assert not flashinfer.bmm_fp8.is_backend_supported("cudnn", 89)
    assert not flashinfer.bmm_fp8.is_backend_supported("cutlass", 100)
