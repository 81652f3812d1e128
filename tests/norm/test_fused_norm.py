"""RMS norm, then SiLU or quantisation in blocks, on the GPU."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.norm import (
    fused_add_rmsnorm_fp8_block_quant,
    fused_rmsnorm_silu,
    rmsnorm_fp8_block_quant,
)
from flashinfer.quantization import per_token_group_quant_8bit
from flashinfer.testing import assert_matches_reference, make_tensor

pytestmark = pytest.mark.gpu
FLOATING = (torch.bfloat16, torch.float16, torch.float32)
# A warp a row with rows left over, few rows, a CTA a row, rows that the copy engine brings, rows
# that do not fit in registers.
SHAPES = [(5, 128), (7, 512), (3, 7168), (300, 1024), (600, 7168), (1501, 3200), (2, 40960)]


def _destinations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, hidden_size = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(hidden_size // 128, -(-rows // 4) * 4, device=x.device)
    return codes, scales


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_quant(shape, dtype, device):
    x = make_tensor(*shape, dtype=dtype, device=device)
    residual = make_tensor(*shape, dtype=dtype, device=device)
    weight = make_tensor(shape[1], dtype=dtype, device=device)
    out, scales = _destinations(x)
    assert_matches_reference(
        rmsnorm_fp8_block_quant, out=out, block_scale=scales, input=x, weight=weight
    )
    results = assert_matches_reference(
        fused_add_rmsnorm_fp8_block_quant,
        out=out,
        block_scale=scales,
        normed_out=torch.empty_like(x),
        input=x,
        residual=residual,
        weight=weight,
    )
    # The codes are exactly those of the norm as it was written.
    codes, scale = per_token_group_quant_8bit(results["normed"], 128, eps=1e-4)
    assert torch.equal(results["output"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(results["block_scale"][:, : shape[0]].t(), scale)


def test_block_quant_agrees_with_the_norm(device):
    x, residual = (make_tensor(33, 4096, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = make_tensor(4096, dtype=torch.bfloat16, device=device)
    out, scales = _destinations(x)
    normed, total = torch.empty_like(x), residual.clone()
    fused_add_rmsnorm_fp8_block_quant(out, scales, normed, x, total, weight)
    y, s = x.clone(), residual.clone()
    flashinfer.fused_add_rmsnorm(y, s, weight)
    assert torch.equal(total, s)
    assert (normed.float() - y.float()).abs().max() <= y.float().abs().max() * 2**-7


def test_rows_apart_and_in_place(device):
    x = make_tensor(9, 1024, dtype=torch.bfloat16, device=device, row_stride=1032)
    residual = make_tensor(9, 1024, dtype=torch.bfloat16, device=device, row_stride=1040)
    weight = make_tensor(1024, dtype=torch.bfloat16, device=device)
    out, scales = _destinations(x)
    arguments = {"out": out, "block_scale": scales, "input": x, "weight": weight}
    assert_matches_reference(
        fused_add_rmsnorm_fp8_block_quant,
        normed_out=torch.empty_like(residual),
        residual=residual,
        **arguments,
    )
    apart = torch.empty_like(x)
    fused_add_rmsnorm_fp8_block_quant(normed_out=apart, residual=residual.clone(), **arguments)
    fused_add_rmsnorm_fp8_block_quant(normed_out=x, residual=residual.clone(), **arguments)
    assert torch.equal(apart, x)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (4, 96), (3, 1), (5, 1023), (2, 33000)], ids=str)
def test_silu(shape, dtype, device):
    for offset in (0, 1):
        x = make_tensor(*shape, dtype=dtype, device=device, storage_offset=offset)
        weight = make_tensor(shape[1], dtype=dtype, device=device)
        assert_matches_reference(fused_rmsnorm_silu, input=x, weight=weight, eps=1e-5)
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        assert_matches_reference(fused_rmsnorm_silu, input=x, weight=weight * 100, out=out)
    apart = fused_rmsnorm_silu(x, weight)
    assert fused_rmsnorm_silu(x, weight, out=x) is x
    assert torch.equal(apart, x)


def test_empty(device):
    x = torch.empty(0, 256, dtype=torch.bfloat16, device=device)
    weight = torch.ones(256, dtype=torch.bfloat16, device=device)
    assert fused_rmsnorm_silu(x, weight).shape == (0, 256)
    rmsnorm_fp8_block_quant(*_destinations(x), x, weight)
