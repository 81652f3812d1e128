"""4-bit quantisation on the GPU: codes and scales are exactly the reference's."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.quantization import (
    SfLayout,
    e2m1_and_ufp8sf_scale_to_float,
    fp4_quantize,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
    mxfp4_quantize,
    nvfp4_quantize,
    silu_and_mul_nvfp4_quantize,
)
from flashinfer.testing import assert_matches_reference, make_tensor, sprinkle_special_values

pytestmark = pytest.mark.gpu
FLOATING = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(1, 64), (128, 128), (129, 160), (3, 5, 96), (300, 4096)]


def _global_scale(x: torch.Tensor) -> torch.Tensor:
    return (448 * 6 / x.float().abs().amax()).reshape(1)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales_are_exact(shape, dtype, device):
    x = make_tensor(*shape, dtype=dtype, device=device)
    for layout in SfLayout:
        flags = {
            "is_sf_swizzled_layout": layout != SfLayout.layout_linear,
            "is_sf_8x4_layout": layout == SfLayout.layout_8x4,
        }
        for block, ue8m0 in ((16, False), (32, True), (32, False), (16, True)):
            outputs = assert_matches_reference(
                fp4_quantize,
                input=x,
                global_scale=_global_scale(x),
                sf_vec_size=block,
                sf_use_ue8m0=ue8m0,
                **flags,
            )
            inverse = None if ue8m0 else 1 / _global_scale(x)  # MXFP4 has no global scale
            back = e2m1_and_ufp8sf_scale_to_float(
                outputs["x_q"], outputs["sf"], inverse, block, int(not ue8m0), **flags
            )
            error = (back - x.float()).abs().reshape(*shape[:-1], -1, block)
            amax = x.float().abs().reshape(error.shape).amax(-1, keepdim=True)
            # Half of the widest step, 2, of codes up to 6; a power of two may double it.
            assert bool((error <= (2.2 if ue8m0 else 1.1) * amax / 6 + 1e-3).all())


def test_a_global_scale_beside_powers_of_two_is_not_read(device):
    x = make_tensor(4, 64, dtype=torch.float16, device=device)
    plain = fp4_quantize(x, sf_vec_size=32, sf_use_ue8m0=True)
    for scale in (3.0, 4.0):
        given = fp4_quantize(x, torch.tensor([scale], device=device), 32, True)
        assert torch.equal(given[0], plain[0]) and torch.equal(given[1], plain[1])


def test_named_forms(device):
    x = make_tensor(200, 512, dtype=torch.bfloat16, device=device)
    scale = _global_scale(x)
    for layout in SfLayout:
        assert_matches_reference(nvfp4_quantize, a=x, a_global_sf=scale, sfLayout=layout)
        assert_matches_reference(mxfp4_quantize, a=x, sfLayout=layout)
    codes, sf = nvfp4_quantize(x, scale)
    again = fp4_quantize(x, 1 / scale, is_global_scale_inversed=True)
    apart = fp4_quantize(x, 1 / (1 / scale))
    assert torch.equal(again[0], apart[0]) and torch.equal(again[1], apart[1])
    codes, sf = mxfp4_quantize(x, sfLayout=SfLayout.layout_linear)
    back = mxfp4_dequantize_host(codes, sf)
    assert torch.equal(back, mxfp4_dequantize(codes, sf, SfLayout.layout_linear))
    assert torch.equal(back, mxfp4_dequantize(*mxfp4_quantize(x)))


def test_every_sixteen_bit_number(device):
    """With a scale of one every number is rounded as it is."""
    x = torch.arange(2**16, device=device).to(torch.int16).view(torch.bfloat16)
    x = x[x.abs() <= 6].reshape(-1, 1).repeat(1, 16)
    x[:, 0] = 6
    for scale in (1.0, 0.37):
        assert_matches_reference(
            fp4_quantize, input=x.contiguous(), global_scale=torch.full((1,), scale, device=device)
        )


def test_magnitudes_far_from_the_global_scale(device):
    """Scales of blocks that overflow to 448 and that underflow to zero."""
    x = make_tensor(64, 512, dtype=torch.bfloat16, device=device)
    x *= torch.logspace(-12, 12, 64, device=device)[:, None].bfloat16()
    for ue8m0 in (False, True):
        assert_matches_reference(
            fp4_quantize,
            input=x,
            global_scale=torch.ones(1, device=device),
            sf_use_ue8m0=ue8m0,
        )


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_special_values_give_the_scales_of_the_reference(dtype, device):
    x = sprinkle_special_values(make_tensor(64, 512, dtype=dtype, device=device), fraction=0.01)
    finite = x.clone().nan_to_num(0.0, 0.0, 0.0)
    assert_matches_reference(fp4_quantize, input=finite)
    assert_matches_reference(mxfp4_quantize, a=finite)
    for quantize in (fp4_quantize, mxfp4_quantize):
        expected = quantize.__flashinfer_trace__.reference(x)
        assert torch.equal(quantize(x)[1], expected[1])


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("row_stride", [512, 520, 700])
def test_strides_and_alignment(row_stride, offset, device):
    x = make_tensor(
        9, 512, dtype=torch.bfloat16, device=device, row_stride=row_stride, storage_offset=offset
    )
    assert_matches_reference(fp4_quantize, input=x, global_scale=_global_scale(x))
    assert_matches_reference(mxfp4_quantize, a=x)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_silu_and_mul_gives_the_bits_of_two_calls(dtype, device):
    x = make_tensor(130, 1024, dtype=dtype, device=device)
    scale = torch.full((1,), 700.0, device=device)
    assert_matches_reference(silu_and_mul_nvfp4_quantize, input=x, global_scale=scale)
    fused = silu_and_mul_nvfp4_quantize(x, scale)
    apart = nvfp4_quantize(flashinfer.silu_and_mul(x), scale)
    assert torch.equal(fused[0], apart[0]) and torch.equal(fused[1], apart[1])
