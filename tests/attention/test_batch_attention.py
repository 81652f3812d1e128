"""Mixed batches in one launch, and attention with sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.plan import mixed
from flashinfer.jit.attention import hopper
from tests.attention.batches import (
    BF16,
    E4M3,
    FP16,
    Batch,
    check,
    indptr,
    need_backend,
    randn,
    workspace,
)

# Decodes, prefills, empty queries and empty keys.
QO = (1, 40, 0, 1, 130, 2, 1, 17)
KV = (400, 200, 50, 64, 130, 9, 0, 17)
MIXED = Batch(QO, KV)
LONG = 3000 if torch.cuda.is_available() else 300  # keys that a GPU cuts; a reference cuts none


def plan_mixed(batch: Batch, device: torch.device, backend: str = "auto", **options: Any) -> Any:
    wrapper = flashinfer.BatchAttention(batch.kv_layout, str(device), backend)
    starts, indices, _, _ = batch.table()
    wrapper.plan(
        *(indptr(batch.qo_lens), starts, indices.to(device)),
        torch.tensor(batch.kv_lens, dtype=torch.int32),
        *(batch.num_qo_heads, batch.num_kv_heads, batch.head_dim_qk, batch.head_dim_vo),
        batch.page_size,
        **batch.dtypes(),
        **options,
    )
    return wrapper


def check_mixed(wrapper: Any, batch: Batch, device: torch.device, **run: Any) -> dict[str, Any]:
    q, cache = batch.query(device), batch.cache(device)
    return check(type(wrapper).run, self=wrapper, q=q, kv_cache=cache, **run)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 4, 7, 16, 20, 64])
def test_groups(group, causal, backend, device):
    batch = Batch(QO, KV, group=group, num_kv_heads=2 if group < 16 else 1)
    check_mixed(plan_mixed(batch, device, backend, causal=causal), batch, device)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["tuple", "fused", "strided"])
def test_caches(page_size, kv_layout, form, backend, device):
    batch = Batch(QO, KV, page_size=page_size, kv_layout=kv_layout, form=form)
    check_mixed(plan_mixed(batch, device, backend, causal=True), batch, device)


@pytest.mark.parametrize(
    "batch",
    [
        Batch((1,) * 4, (700, 3, 0, 64)),
        Batch((40, 300, 129), (300, 300, 200)),
        Batch(QO, KV, head_dim_qk=192),
        Batch(QO, KV, head_dim_qk=256, head_dim_vo=256),
        Batch(QO, KV, head_dim_qk=512, head_dim_vo=512),
        Batch(QO, KV, dtype=FP16),
        Batch(QO, KV, kv_dtype=E4M3),
    ],
    ids=["decode", "prefill", "192/128", "256", "512", "float16", "e4m3"],
)
def test_batches(batch, device):
    check_mixed(plan_mixed(batch, device, causal=True), batch, device)


@pytest.mark.parametrize(("qk", "vo"), hopper.HEAD_DIMS)
def test_both_kernels_agree(qk, vo, device):
    """Two shapes of tiles and one: to the rounding of the weights and of the output."""
    need_backend("fa3", device)
    batch = Batch(QO, KV, head_dim_qk=qk, head_dim_vo=vo)
    q, cache = batch.query(device), batch.cache(device)
    outs = [plan_mixed(batch, device, name, causal=True).run(q, cache) for name in ("fa2", "fa3")]
    torch.testing.assert_close(outs[0][0].float(), outs[1][0].float(), rtol=0.016, atol=4e-3)
    torch.testing.assert_close(outs[0][1], outs[1][1], rtol=1e-5, atol=1e-4)


def test_options(backend, device):
    options = {"causal": True, "logits_soft_cap": 3.0, "sm_scale": 0.2}
    wrapper = plan_mixed(MIXED, device, backend, **options)
    check_mixed(wrapper, MIXED, device, k_scale=0.5, v_scale=2.0, logits_soft_cap=3.0)


@pytest.mark.parametrize(
    ("batch", "options", "run"),
    [
        (MIXED, {"causal": True}, {}),
        (MIXED, {"logits_soft_cap": 9.0}, {"v_scale": 0.5}),
        (Batch(QO, KV, kv_layout="HND", page_size=7), {"causal": True}, {}),
        (Batch(QO, KV, head_dim_qk=256, head_dim_vo=256), {"causal": True}, {}),
        (Batch(QO, KV, kv_dtype=E4M3), {"causal": True}, {"k_scale": 0.25}),
        (Batch((1,) * 70 + (400, 3), (LONG,) * 70 + (400, 3 * LONG)), {"causal": True}, {}),
    ],
    ids=["causal", "soft cap", "HND", "256", "e4m3", "split"],
)
def test_decoding_requests_have_a_launch_of_their_own(batch, options, run, device, monkeypatch):
    """Each launch leaves the rows of the other alone; in a CUDA graph as well."""
    need_backend("fa3", device)
    monkeypatch.setattr(mixed, "_is_faster_apart", lambda *arguments: True)
    wrapper = plan_mixed(batch, device, **options)
    executor = wrapper._executor
    assert (executor.config.backend, executor._decoder.config.backend) == ("fa3", "fa2")
    check_mixed(wrapper, batch, device, **run)
    if device.type != "cuda":
        return
    q, cache = batch.query(device), batch.cache(device)
    expected = wrapper.run(q, cache, **run)
    out, lse = (torch.full_like(tensor, float("nan")) for tensor in expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, cache, out=out, lse=lse, **run)
    graph.replay()
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_one_wrapper_serves_every_batch(backend, device):
    wrapper = flashinfer.BatchAttention(device=str(device), backend=backend)
    for qo_lens, kv_lens in ((QO, KV), ((1, 1), (5000, 9)), ((600,), (800,)), (QO, KV)):
        batch = Batch(qo_lens, kv_lens)
        starts, indices, _, _ = batch.table()
        lengths = torch.tensor(kv_lens, dtype=torch.int32)
        sizes = (batch.num_qo_heads, batch.num_kv_heads, 128, 128, batch.page_size)
        tables = (indptr(qo_lens), starts, indices.to(device), lengths)
        wrapper.plan(*tables, *sizes, causal=True)
        check_mixed(wrapper, batch, device)


# ---- sinks -------------------------------------------------------------------------------------


def plan_sinks(
    batch: Batch, device: torch.device, window: int = -1, backend: str = "auto", **options: Any
) -> Any:
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        workspace(device),
        batch.kv_layout,
        head_dim_qk=batch.head_dim_qk,
        head_dim_vo=batch.head_dim_vo,
        window_left=window,
        backend=backend,
        **batch.dtypes(),
    )
    starts, indices, last, _ = batch.table()
    wrapper.plan(
        *(indptr(batch.qo_lens), starts, indices.to(device), last),
        *(batch.num_qo_heads, batch.num_kv_heads, batch.head_dim_qk, batch.page_size),
        head_dim_vo=batch.head_dim_vo,
        **batch.dtypes(),
        **options,
    )
    return wrapper


@pytest.mark.parametrize("window", [-1, 0, 20])
@pytest.mark.parametrize("batch", [MIXED, Batch((1,) * 4, (700, 3, 0, 64), group=8)])
def test_sinks(batch, window, backend, device):
    wrapper = plan_sinks(batch, device, window, backend, causal=True)
    sinks = 3 * randn((batch.num_qo_heads,), torch.float32, device, 6)
    run = {"q": batch.query(device), "paged_kv_cache": batch.cache(device), "sinks": sinks}
    check(type(wrapper).run, self=wrapper, return_lse=True, **run)


def test_sinks_and_scale_may_follow_the_cache(device):
    wrapper = plan_sinks(MIXED, device, causal=True)
    q, cache = MIXED.query(device), MIXED.cache(device)
    sinks = randn((MIXED.num_qo_heads,), torch.float32, device, 6)
    by_name = wrapper.run(q, cache, sinks=sinks)
    assert torch.equal(wrapper.run(q, cache, sinks), by_name)
    assert torch.equal(wrapper.run(q, cache, sinks, 128**-0.5), by_name)
    scaled = plan_sinks(MIXED, device, causal=True, sm_scale=0.3).run(q, cache, sinks)
    torch.testing.assert_close(wrapper.run(q, cache, sinks, 0.3), scaled, rtol=2**-7, atol=2**-8)


def test_a_large_sink_takes_everything(device):
    wrapper = plan_sinks(MIXED, device, causal=True)
    sinks = torch.full((MIXED.num_qo_heads,), 200.0, device=device)
    out, lse = wrapper.run(MIXED.query(device), MIXED.cache(device), sinks, return_lse=True)
    assert out.abs().max() < 1e-30
    torch.testing.assert_close(lse, torch.full_like(lse, 200 * 1.4426950408889634))


def test_bfloat16_is_what_the_wrapper_is_made_for_by_default(device):
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(device))
    starts, indices, last, _ = MIXED.table()
    tables = (indptr(QO), starts, indices.to(device), last)
    wrapper.plan(*tables, MIXED.num_qo_heads, MIXED.num_kv_heads, 128, 16)
    q, cache = MIXED.query(device), MIXED.cache(device)
    assert wrapper.run(q, cache, torch.zeros(MIXED.num_qo_heads, device=device)).dtype == BF16
