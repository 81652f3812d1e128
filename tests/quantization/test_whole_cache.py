"""A whole cache quantised to 4 bits: the numbers come back, and attention reads it."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer.quantization import get_fp4_quantization_module

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def _caches(kv_layout: str, dtype: torch.dtype, device, form: str = "apart"):
    """Keys and values, [5 pages, 4 slots, 2 heads] of 64 and 128; the first page is zero."""
    torch.manual_seed(11)
    k, v = torch.randn(5, 4, 2, 64), 30 * torch.randn(5, 4, 2, 64 if form == "fused" else 128)
    k[0] = v[0] = 0.0
    if form == "fused":
        k, v = torch.stack([k, v], dim=1).unbind(1)
    pair = (x if kv_layout == "NHD" else x.transpose(1, 2) for x in (k, v))
    return tuple(x.to(device, dtype) for x in pair)


def _values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Numbers of codes and scales in float64, the global scale left out."""
    codes, factors = codes.cpu(), scales.cpu().double()
    both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    numbers = MAGNITUDES[both & 7] * torch.where(both >= 8, -1.0, 1.0)
    return numbers * factors.repeat_interleave(16, -1)


@pytest.mark.any_device
@pytest.mark.parametrize("form", ["apart", "fused"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_numbers_come_back(kv_layout, dtype, form, device):
    caches = _caches(kv_layout, dtype, device, form)
    given = {"k_global_sf": torch.tensor([37.5], device=device)}
    for options in ({}, given):
        codes, sf, *factors = flashinfer.nvfp4_quantize_paged_kv_cache(
            *caches, kv_layout, **options
        )
        assert all(type(factor) is float for factor in factors)
        for i, cache in enumerate(caches):
            amax = cache.float().abs().max().item()
            wanted = 1 / 37.5 if options and i == 0 else amax / 448
            assert math.isclose(factors[i], wanted, rel_tol=1e-6)
            assert codes[i].shape == (*cache.shape[:3], cache.shape[3] // 2)
            assert sf[i].shape == (*cache.shape[:3], cache.shape[3] // 16)
            assert codes[i].dtype == torch.uint8 and sf[i].dtype == torch.float8_e4m3fn
            exact = cache.cpu().double()
            back = _values(codes[i], sf[i]) * factors[i]
            largest = exact.unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
            # Half of the widest step, 2 of 6, and a scale that is rounded to 3 bits.
            assert bool(((back - exact).abs() <= 1.1 * largest / 6 + 1e-9).all())


@pytest.mark.any_device
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_attention_reads_it(kv_layout, device):
    dtype = torch.bfloat16
    k, v = _caches(kv_layout, dtype, device, "fused")
    codes, sf, k_scale, v_scale = flashinfer.nvfp4_quantize_paged_kv_cache(k, v, kv_layout)
    workspace = torch.empty(16 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout)
    starts, last = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    pages = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    wrapper.plan(starts, pages, last, 4, 2, 64, 4, q_data_type=dtype, kv_data_type=torch.uint8)
    q = torch.randn(1, 4, 64, device=device).to(dtype)
    out = wrapper.run(q, codes, k_scale=k_scale, v_scale=v_scale, kv_cache_sf=sf)
    rows = []
    for part, scale in zip(range(2), (k_scale, v_scale), strict=True):
        values = _values(codes[part], sf[part]) * scale
        by_slot = values if kv_layout == "NHD" else values.transpose(1, 2)
        rows.append(by_slot[[4, 0, 2]].flatten(0, 1)[:10].repeat_interleave(2, 1))
    logits = torch.einsum("hd,thd->ht", q[0].cpu().double(), rows[0]) / 8
    expected = torch.einsum("ht,thd->hd", logits.softmax(-1), rows[1])
    torch.testing.assert_close(out[0].cpu().double(), expected, atol=0.25, rtol=2e-2)
    assert expected.abs().max() > 10


@pytest.mark.any_device
def test_refusals(device):
    k, v = _caches("HND", torch.bfloat16, device)
    quantize = flashinfer.nvfp4_quantize_paged_kv_cache
    for name, arguments in {
        "k_cache": (k[0], v),
        "v_cache": (k, v[:4]),
        "k_global_sf": (k, v, "HND", torch.ones(2, device=device)),
    }.items():
        with pytest.raises(ValueError, match=f"`{name}`"):
            quantize(*arguments)
    for wrong in (v.float(), v[..., :24], v.half()):
        with pytest.raises(ValueError, match="`v_cache`"):
            quantize(k, wrong)
    with pytest.raises(ValueError, match="kv_layout"):
        quantize(k, v, "HDN")
    zero = quantize(torch.zeros_like(k), torch.zeros_like(v))
    assert zero[2:] == (1.0, 1.0) and not zero[0][0].any()


@pytest.mark.compiler
def test_modules(monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    with pytest.raises(TypeError, match="missing argument"):
        get_fp4_quantization_module("90").group_quant()
    with pytest.raises(ValueError, match="`backend`"):
        get_fp4_quantization_module("80")
    specs = (
        flashinfer.jit.gen_fp4_kv_quantization_module(),
        (flashinfer.jit.gen_fp4_kv_dequantization_module()),
    )
    assert [spec.name.partition("_dtype_")[0] for spec in specs] == ["group_quant", "kv_float4"]
    assert all(spec.config.dtype == torch.bfloat16 for spec in specs)
