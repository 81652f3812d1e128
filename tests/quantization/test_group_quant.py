"""Group quantisation on the GPU: codes and scales are exactly the reference's."""

from __future__ import annotations

import pytest
import torch

from flashinfer.quantization import (
    SfLayout,
    mxfp8_dequantize_host,
    mxfp8_quantize,
    per_token_group_quant_8bit,
    silu_and_mul_per_token_group_quant_8bit,
)
from flashinfer.testing import assert_matches_reference, make_tensor, sprinkle_special_values

pytestmark = pytest.mark.gpu
FLOATING = (torch.bfloat16, torch.float16, torch.float32)
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
GROUP_SIZES = [1, 4, 8, 16, 24, 31, 32, 40, 48, 64, 96, 256, 512, 1024, 2048, 7168]
GROUPS_OF_128 = [(1, 128), (33, 896), (7, 3, 512), (130, 7168)]


@pytest.mark.parametrize("dst_dtype", CODES, ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", GROUPS_OF_128, ids=str)
def test_codes_and_scales_are_exact(shape, dtype, dst_dtype, device):
    x = make_tensor(*shape, dtype=dtype, device=device)
    for ue8m0 in (False, True):
        assert_matches_reference(
            per_token_group_quant_8bit,
            x=x,
            group_size=128,
            dst_dtype=dst_dtype,
            scale_ue8m0=ue8m0,
        )


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_every_group_size(group_size, device):
    x = make_tensor(3, 4 * group_size, dtype=torch.bfloat16, device=device)
    assert_matches_reference(per_token_group_quant_8bit, x=x, group_size=group_size)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 129])
def test_column_major_scales(rows, aligned, device):
    x = make_tensor(rows, 1024, dtype=torch.bfloat16, device=device)
    outputs = assert_matches_reference(
        per_token_group_quant_8bit,
        x=x,
        group_size=128,
        column_major_scales=True,
        scale_tma_aligned=aligned,
    )
    stride = -(-rows // 4) * 4 if aligned else rows
    assert outputs["scale"].stride() == (1, stride)
    row_major = per_token_group_quant_8bit(x, 128)[1]
    assert torch.equal(outputs["scale"], row_major)


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("row_stride", [512, 520, 700])
def test_strides_and_alignment(row_stride, offset, device):
    x = make_tensor(
        9, 512, dtype=torch.float16, device=device, row_stride=row_stride, storage_offset=offset
    )
    assert_matches_reference(per_token_group_quant_8bit, x=x, group_size=128)
    assert_matches_reference(mxfp8_quantize, input=x)


@pytest.mark.parametrize("dst_dtype", CODES, ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_special_values(dtype, dst_dtype, device):
    x = sprinkle_special_values(make_tensor(64, 512, dtype=dtype, device=device), fraction=0.01)
    x[0], x[1, 0], x[2, 5] = 0, float("nan"), float("-inf")
    for ue8m0 in (False, True):
        assert_matches_reference(
            per_token_group_quant_8bit, x=x, group_size=128, dst_dtype=dst_dtype, scale_ue8m0=ue8m0
        )
    assert_matches_reference(mxfp8_quantize, input=x)


def test_quotients_on_ties(device):
    """All 16-bit numbers as elements and as largest ones: halves between codes are common here."""
    numbers = torch.arange(0x7F80, device=device).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[(numbers > 1e-3) & (numbers < 1e3)]
    largest = numbers[torch.randint(len(numbers), (512,), device=device)]
    x = torch.minimum(numbers.repeat(512, 1), largest[:, None])[:, : len(numbers) // 128 * 128]
    x[:, ::128] = largest[:, None]
    assert_matches_reference(per_token_group_quant_8bit, x=x.contiguous(), group_size=128)


@pytest.mark.parametrize("layout", SfLayout)
@pytest.mark.parametrize("shape", [(1, 32), (128, 128), (129, 160), (3, 5, 96), (300, 4096)])
def test_mxfp8(shape, layout, device):
    x = make_tensor(*shape, dtype=torch.bfloat16, device=device)
    for alignment in (32, 128):
        outputs = assert_matches_reference(
            mxfp8_quantize, input=x, alignment=alignment, sf_swizzle_layout=layout
        )
        back = mxfp8_dequantize_host(outputs["x_q"], outputs["sf"], sf_swizzle_layout=layout)
        error = (back[..., : shape[-1]] - x.float()).abs()
        # Half a step of E4M3, and of its subnormals at the block's scale.
        limit = x.float().abs() / 16 + x.float().abs().amax() / 2**17
        assert bool((error <= limit).all())


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", [(1, 256), (65, 7168), (3, 4, 512)])
def test_silu_and_mul_gives_the_bits_of_two_calls(shape, dtype, device):
    import flashinfer

    x = make_tensor(*shape, dtype=dtype, device=device)
    assert_matches_reference(silu_and_mul_per_token_group_quant_8bit, x=x, group_size=128)
    fused = silu_and_mul_per_token_group_quant_8bit(x, 128)
    apart = per_token_group_quant_8bit(flashinfer.silu_and_mul(x), 128)
    assert torch.equal(fused[0].view(torch.uint8), apart[0].view(torch.uint8))
    assert torch.equal(fused[1], apart[1])


def test_empty(device):
    for shape in ((0, 256), (3, 0)):
        x = torch.empty(shape, dtype=torch.bfloat16, device=device)
        x_q, scale = per_token_group_quant_8bit(x, 128)
        assert x_q.shape == x.shape and scale.shape == (shape[0], shape[1] // 128)


def test_captured_in_a_graph(device):
    x = make_tensor(64, 1024, dtype=torch.bfloat16, device=device)
    per_token_group_quant_8bit(x, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x_q, scale = per_token_group_quant_8bit(x, 128)
    x.copy_(torch.randn_like(x))
    graph.replay()
    again = per_token_group_quant_8bit(x, 128)
    assert torch.equal(x_q.view(torch.uint8), again[0].view(torch.uint8))
    assert torch.equal(scale, again[1])


def test_more_than_2_to_the_31_elements(device, full):
    if not full:
        pytest.skip("17 GB; run with --full")
    rows = 2**31 // 4096 + 3
    x = torch.randn(rows, 4096, dtype=torch.bfloat16, device=device)
    x_q, scale = per_token_group_quant_8bit(x, 128)
    tail = per_token_group_quant_8bit(x[-2:].clone(), 128)
    assert torch.equal(x_q[-2:].view(torch.uint8), tail[0].view(torch.uint8))
    assert torch.equal(scale[-2:], tail[1])
