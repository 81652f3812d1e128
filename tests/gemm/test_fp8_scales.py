"""8-bit products with one scale or one per row and column, and grouped ones that are prepared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer import deep_gemm, gemm

pytestmark = pytest.mark.usefixtures("hopper")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(1, 16, 64), (5, 272, 1024), (70, 144, 208), (130, 640, 384)]


def _codes(*shape: int, device: torch.device, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _assert_near(out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Within rounding to `out` and the 14 bits in which Hopper's tensor cores sum."""
    bound = torch.finfo(out.dtype).eps * expected.abs() + 2.0**-12 * magnitude
    assert out.shape == expected.shape
    assert bool(((out.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("backend", ["cublas", "cudnn", "auto"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_scale(shape: tuple[int, int, int], backend: str, device: torch.device) -> None:
    m, n, k = shape
    a, b = _codes(m, k, device=device), _codes(n, k, device=device).t()
    alpha = torch.tensor([0.25], device=device)
    out = torch.full((m, n), float("nan"), dtype=BF16, device=device)
    assert flashinfer.mm_fp8(a, b, alpha, out=out, backend=backend) is out
    left, right = a.double(), b.double()
    _assert_near(out, 0.25 * left @ right, 0.25 * left.abs() @ right.abs())
    _assert_near(flashinfer.mm_fp8(a, b, backend=backend), left @ right, left.abs() @ right.abs())


@pytest.mark.parametrize("dtype", [BF16, HALF, FLOAT, E4M3], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_of_tokens_and_channels(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    m, n, k = shape
    a, weight = _codes(m, k, device=device), _codes(n, k, device=device)
    a_scale, weight_scale = torch.rand(m, device=device), torch.rand(n, device=device)
    bias = torch.randn(n, device=device).to(BF16 if dtype == E4M3 else dtype)
    more: dict[str, Any] = {}
    if dtype == E4M3:
        more["output_quant_scale"] = torch.tensor([3.0], device=device)
    out = gemm.fp8_linear(a, weight, a_scale, weight_scale, bias, out_dtype=dtype, **more)
    assert out.dtype == dtype
    scales = a_scale.double()[:, None] * weight_scale.double()
    expected = a.double() @ weight.double().T * scales + bias.double()
    magnitude = a.double().abs() @ weight.double().abs().T * scales + bias.double().abs()
    if dtype == E4M3:
        expected, magnitude = (expected * 3.0).clamp(-448, 448), magnitude * 3.0
        magnitude = magnitude + 2.0**2  # subnormal steps of the format
    _assert_near(out, expected, magnitude)


def test_groups_with_one_scale(device: torch.device) -> None:
    lengths = [3, 0, 130, 5]
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    a = _codes(138, 208, device=device)
    b = _codes(4, 136, 208, device=device, dtype=E5M2)
    alpha = torch.tensor([0.5], device=device)
    out = flashinfer.grouped_mm_fp8(a, b, bounds, alpha)
    first = 0
    for group, length in enumerate(lengths):
        rows = slice(first, first + length)
        left, right = a[rows].double(), b[group].double().T
        _assert_near(out[rows], 0.5 * left @ right, 0.5 * left.abs() @ right.abs())
        first += length


def _grouped(device: torch.device) -> tuple[Any, ...]:
    a, b = _codes(384, 256, device=device), _codes(3, 512, 256, device=device)
    a_scale = torch.rand(384, 2, device=device) + 0.5
    b_scale = torch.rand(3, 4, 2, device=device) + 0.5
    numbers = torch.tensor([2, 0, 1], device=device, dtype=torch.int32).repeat_interleave(128)
    return a, b, a_scale, b_scale, numbers


def test_contiguous_groups_and_their_names(device: torch.device) -> None:
    a, b, a_scale, b_scale, numbers = _grouped(device)
    expected = gemm.group_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, numbers)
    out = gemm.group_gemm_fp8_nt_groupwise_contiguous(
        a, b, a_scale, b_scale, numbers, validate_indices=True
    )
    assert torch.equal(out, expected)
    prepared = gemm.prepare_group_gemm_fp8_nt_groupwise_contiguous(a, b, a_scale, b_scale, numbers)
    other = torch.full_like(out, float("nan"))
    assert torch.equal(prepared.launch(), expected)
    assert prepared.launch(out=other) is other and torch.equal(other, expected)
    prepared.release_prepared_operands()
    with pytest.raises(ValueError, match="`a` was released"):
        prepared.launch()
    assert torch.equal(prepared.launch(a, a_scale, numbers), expected)
    d = torch.full_like(out, float("nan"))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), d, numbers)
    assert torch.equal(d, expected)


def test_masked_groups_and_their_names(device: torch.device) -> None:
    a, b, a_scale, b_scale, _ = _grouped(device)
    a, a_scale = a.view(3, 128, 256), a_scale.view(3, 128, 2)
    counts = torch.tensor([128, 5, 0], dtype=torch.int32, device=device)
    outs = [torch.zeros(3, 128, 512, dtype=BF16, device=device) for _ in range(3)]
    operands = (a, b, a_scale, b_scale, counts, 60)
    gemm.batch_deepgemm_fp8_nt_groupwise(*operands, out=outs[0])
    prepared = gemm.prepare_batch_deepgemm_fp8_nt_groupwise(*operands, out=outs[1])
    assert prepared.launch() is outs[1]
    deep_gemm.m_grouped_fp8_gemm_nt_masked((a, a_scale), (b, b_scale), outs[2], counts, 60)
    for group, count in enumerate([128, 5, 0]):
        for out in outs[1:]:
            assert torch.equal(out[group, :count], outs[0][group, :count])


def test_product_with_swiglu_and_quantisation(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU: the operation has no reference backend")
    operands = _grouped(device)
    prepared = gemm.prepare_group_gemm_fp8_nt_groupwise_contiguous_silu_quant(*operands)
    codes, scale = prepared.launch()
    product = gemm.group_deepgemm_fp8_nt_groupwise(*operands, out_dtype=BF16).double()
    gates, values = product[:, :256], product[:, 256:]
    expected = torch.nn.functional.silu(gates) * values
    found = codes.double() * scale.double().repeat_interleave(128, 1)
    # Half a step of e4m3 at the largest of 128, and the rounding of products to bfloat16.
    largest = expected.abs().view(384, 2, 128).amax(-1).repeat_interleave(128, 1)
    assert bool(((found - expected).abs() <= 2.0**-4 * expected.abs() + 2.0**-7 * largest).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "trtllm_low_latency"}, "does not support backend 'trtllm_low_latency'"),
        ({"a": torch.zeros(4, 64)}, "`a` must have dtype float8_e4m3fn"),
        ({"b": torch.zeros(32, 48, dtype=E4M3).t()}, r"`b` must have shape \[64, n\]"),
        ({"b": torch.zeros(64, 32, dtype=E4M3)}, "`b` must be column-major"),
        ({"alpha": torch.ones(2)}, "`alpha` must have one element"),
        ({"out_dtype": FLOAT}, "`out_dtype` must have dtype"),
        ({"out": torch.zeros(4, 31, dtype=BF16)}, "`out` must have shape"),
    ],
)
def test_refusals(change: dict[str, Any], message: str, device: torch.device) -> None:
    good = {"a": torch.zeros(4, 64, dtype=E4M3), "b": torch.zeros(32, 64, dtype=E4M3).t()}
    given = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in {**good, "backend": "cublas", **change}.items()
    }
    with pytest.raises((ValueError, TypeError), match=message):
        flashinfer.mm_fp8(**given)


def test_refusals_of_numbers(device: torch.device) -> None:
    a, b, a_scale, b_scale, numbers = _grouped(device)
    for bad, message in ((numbers + 1, "groups below 3"), (torch.arange(384), "one group for")):
        with pytest.raises(ValueError, match=message):
            gemm.group_gemm_fp8_nt_groupwise_contiguous(
                a, b, a_scale, b_scale, bad.to(device, torch.int32), validate_indices=True
            )
    with pytest.raises(ValueError, match="`recipe` must be None or"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (a, a_scale), (b, b_scale), a, numbers, recipe=(1, 1, 128)
        )
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == 128
    assert deep_gemm.get_tma_aligned_size(5, 4) == 8
