"""Decode whose results are codes of 8 bits, with a scale for each token's head."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.testing import assert_matches_reference
from tests.attention.batches import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    Batch,
    plan_decode,
    workspace,
)
from tests.attention.packed import PACKED, packed_pages

LENGTHS = (0, 1, 63, 64, 65, 700, 16, 0)
NAN = float("nan")


def _decode(lengths=LENGTHS, **changes) -> Batch:
    return Batch(**{"qo_lens": (1,) * len(lengths), "kv_lens": lengths, "o_dtype": E4M3, **changes})


def _scales(batch: Batch, device: torch.device) -> torch.Tensor:
    """Poisoned, a head's neighbours first, as products read them."""
    rows = sum(batch.qo_lens)
    return torch.full((batch.num_qo_heads, rows + 3), NAN, device=device).t()[:rows]


def _run(wrapper, batch: Batch, device: torch.device, **options) -> tuple[torch.Tensor, ...]:
    q, scale = batch.query(device), _scales(batch, device)
    out = torch.full(q.shape, NAN, device=device).to(E4M3)
    assert wrapper.run(q, batch.cache(device), out=out, out_scale=scale, **options) is out
    return out, scale


def _check_near_16_bits(batch: Batch, device: torch.device, **plan) -> None:
    """Codes times scales are what the same plan gives in 16 bits, and no code is wasted."""
    out, scale = _run(plan_decode(batch, device, **plan), batch, device)
    wide = Batch(**{**vars(batch), "o_dtype": BF16})
    expected = plan_decode(wide, device, **plan).run(wide.query(device), wide.cache(device)).float()
    made = out.float() * scale[..., None]
    # Half a step of a code, and that of bfloat16.
    bound = expected.abs() * (2**-4 + 2**-8) + scale[..., None] * 2**-9
    assert bool(((made - expected).abs() <= bound).all())
    largest = out.float().abs().amax(-1)
    assert bool(((largest == 448) | (expected.abs().amax(-1) == 0)).all())


def _check(wrapper, batch: Batch, device: torch.device, **run) -> None:
    """`run` with and without LSE, against the reference."""
    tensors = {"q": batch.query(device), "paged_kv_cache": batch.cache(device)}
    for return_lse in (False, True):
        run["out_scale"] = _scales(batch, device)
        assert_matches_reference(
            type(wrapper).run, self=wrapper, return_lse=return_lse, **tensors, **run
        )


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3, E5M2])
@pytest.mark.parametrize("group", [1, 4, 5, 8, 16])
def test_against_16_bits(kv_dtype, group, device):
    _check_near_16_bits(_decode(group=group, kv_dtype=kv_dtype), device)


@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3])
def test_against_the_reference(dtype, device):
    batch = _decode(dtype=dtype, kv_dtype=E4M3)
    wrapper = plan_decode(batch, device)
    _check(wrapper, batch, device)
    scales = {"q_scale": 1.5, "k_scale": 0.5, "v_scale": -2.5}
    _check(wrapper, batch, device, **scales)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_4_bit_caches(group, device):
    batch = _decode(group=group, kv_dtype=PACKED)
    arguments = packed_pages(batch, device) | {"out_scale": _scales(batch, device)}
    wrapper = plan_decode(batch, device)
    assert_matches_reference(type(wrapper).run, self=wrapper, **arguments)


@pytest.mark.parametrize("options", [{"window_left": 30}, {"logits_soft_cap": 5.0}])
@pytest.mark.parametrize("tokens", [2, 4])
def test_several_queries(tokens, options, device):
    lengths = (tokens, 64, 200, tokens)
    batch = _decode(lengths, qo_lens=(tokens,) * 4)
    wrapper = plan_decode(batch, device, q_len_per_req=tokens, **options)
    _check(wrapper, batch, device)


@pytest.mark.parametrize("lengths", [(30000,), (9000, 3, 20000, 0), (5000,) * 9])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_requests_that_are_merged(lengths, kv_dtype, device):
    if device.type != "cuda":
        lengths = tuple(n // 20 for n in lengths)
    _check_near_16_bits(_decode(lengths, kv_dtype=kv_dtype, page_size=64), device)


@pytest.mark.parametrize("split", [{"fixed_split_size": 128}, {"disable_split_kv": True}])
def test_fixed_splits(split, device):
    _check_near_16_bits(_decode(), device, **split)


def test_strided_results_leave_what_lies_between(device):
    batch = _decode()
    wrapper, q, cache = plan_decode(batch, device), batch.query(device), batch.cache(device)
    rows, heads, dim = q.shape
    wide = torch.full((rows, 2 * heads, dim), 3.0, device=device).to(E4M3)
    scales = torch.full((rows, heads, 2), 7.0, device=device)
    wrapper.run(q, cache, out=wide[:, ::2], out_scale=scales[..., 1])
    expected = _run(wrapper, batch, device)
    assert torch.equal(wide[:, ::2].float(), expected[0].float())
    assert torch.equal(scales[..., 1], expected[1])
    assert bool((wide[:, 1::2].float() == 3).all()) and bool((scales[..., 0] == 7).all())


def test_runs_give_the_same_bits(device):
    batch = _decode((4000, 100, 2500) if device.type == "cuda" else (400, 100, 250))
    wrapper = plan_decode(batch, device)
    first = _run(wrapper, batch, device)
    for _ in range(5):
        for one, other in zip(first, _run(wrapper, batch, device), strict=True):
            assert torch.equal(one.float(), other.float())


def test_magnitudes_from_zero_to_large(device):
    batch = _decode((5, 70, 300))
    wrapper, q = plan_decode(batch, device), batch.query(device)
    k, v = batch.cache(device)
    for factor in (0.0, 2.0**-30, 2.0**10):
        values = (v.float() * factor).to(v.dtype)
        out, scale = torch.empty_like(q, dtype=E4M3), _scales(batch, device)
        wrapper.run(q, (k, values), out=out, out_scale=scale)
        assert bool((scale > 0).all())
        if factor == 0.0:
            assert bool((out.float() == 0).all())
            continue
        one = _scales(batch, device)
        same = torch.empty_like(out)
        wrapper.run(q, (k, v), out=same, out_scale=one)
        assert torch.equal(out.float(), same.float())  # powers of two change the scale alone
        torch.testing.assert_close(scale, one * factor, rtol=1e-6, atol=0.0)


@pytest.mark.gpu
def test_captured_with_fewer_requests(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU: captures a graph")
    batch = _decode((70, 3000, 5), kv_dtype=E4M3)
    starts, indices, last, _ = batch.table()
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (9, 600, 8)]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device),
        use_cuda_graph=True,
        paged_kv_indptr_buffer=buffers[0],
        paged_kv_indices_buffer=buffers[1],
        paged_kv_last_page_len_buffer=buffers[2],
    )
    heads = batch.num_qo_heads, batch.num_kv_heads, batch.head_dim_qk, batch.page_size
    wrapper.plan(starts, indices.to(device), last, *heads, **batch.dtypes())
    q = torch.cat([batch.query(device)] * 3)[:8]
    cache = batch.cache(device)
    out = torch.zeros_like(q, dtype=E4M3)
    scale = torch.zeros(q.shape[:2], device=device)
    wrapper.run(q, cache, out=out, out_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, cache, out=out, out_scale=scale)
    out.view(torch.uint8).fill_(0x7F)
    scale.fill_(NAN)
    graph.replay()
    expected = _run(plan_decode(batch, device), batch, device)
    made = out[:3].float() * scale[:3, :, None]
    torch.testing.assert_close(
        made, expected[0].float() * expected[1][..., None], rtol=2**-3, atol=2e-3
    )
    assert bool(scale[3:].isnan().all())  # rows beyond the plan are not computed


def test_a_product_reads_codes_and_scales(device):
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0 for the product")
    batch = _decode((300, 5, 900), num_kv_heads=2)
    out, scale = _run(plan_decode(batch, device), batch, device)
    inputs = out[0].numel()
    weight = torch.randn(256, inputs, device=device).to(E4M3)
    weight_scale = torch.rand(2, inputs // 128, device=device) + 0.5
    made = flashinfer.gemm.fp8_blockscale_gemm_sm90(out.flatten(1), weight, scale, weight_scale)
    x = (out.double() * scale.double()[..., None]).flatten(1)
    blocks = weight_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = x @ (weight.double() * blocks).t()
    error = (made.double() - expected).abs().max() / expected.abs().max()
    assert float(error) < 0.01
