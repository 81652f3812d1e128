"""Prefill over paged, ragged and single keys: shapes, layouts, masks by length."""

from __future__ import annotations

import itertools

import pytest
import torch

import flashinfer
from tests.attention.batches import (
    BF16,
    E4M3,
    E5M2,
    FORMS,
    FP16,
    Batch,
    check,
    check_paged,
    check_ragged,
    indptr,
    plan_paged,
    plan_ragged,
    randn,
    workspace,
)

# Empty queries, empty keys, more queries than keys, and lengths around the tiles' sizes.
QO = (0, 5, 40, 1, 129, 17, 3, 64)
KV = (9, 5, 300, 0, 129, 11, 3, 65)
USUAL = Batch(QO, KV)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 20, 64])
def test_group_sizes(group, causal, backend, device):
    batch = Batch(QO, KV, group=group, num_kv_heads=1 if group > 8 else 3)
    check_paged(plan_paged(batch, device, backend, causal=causal), batch, device)


@pytest.mark.parametrize(
    ("page_size", "form"), [*itertools.product([1, 3, 5, 16, 64], FORMS), (1, "tokens")]
)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_caches(page_size, kv_layout, form, backend, device):
    batch = Batch(QO, KV, page_size=page_size, kv_layout=kv_layout, form=form)
    check_paged(plan_paged(batch, device, backend, causal=True), batch, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_ragged(kv_layout, causal, backend, device):
    batch = Batch(QO, KV, kv_layout=kv_layout)
    check_ragged(plan_ragged(batch, device, backend, causal=causal), batch, device)


PAIRS = [(64, 64), (80, 80), (192, 128), (256, 256), (448, 256), (512, 512), (48, 112)]
MORE_PAIRS = [(d, d) for d in range(16, 257, 16) if (d, d) not in PAIRS]
MORE_PAIRS += [(128, 64), (64, 256), (448, 448), (512, 256), (320, 288)]


@pytest.mark.parametrize(("qk", "vo"), PAIRS + MORE_PAIRS)
def test_head_dims(qk, vo, device, full):
    if (qk, vo) in MORE_PAIRS and not full:
        pytest.skip("these head sizes under --full")
    batch = Batch(QO, KV, head_dim_qk=qk, head_dim_vo=vo)
    check_ragged(plan_ragged(batch, device, causal=True), batch, device)
    if full:
        check_paged(plan_paged(batch, device, causal=True), batch, device)


@pytest.mark.parametrize("kv_dtype", [None, E4M3, E5M2], ids=["same", "e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_dtypes_and_scales(dtype, kv_dtype, device):
    batch = Batch(QO, KV, dtype=dtype, kv_dtype=kv_dtype)
    wrapper = plan_paged(batch, device, causal=True)
    check_paged(wrapper, batch, device)
    check_paged(wrapper, batch, device, q_scale=0.5, k_scale=3.0, v_scale=1.5)


def test_ragged_scales(backend, device):
    wrapper = plan_ragged(USUAL, device, backend, causal=True)
    check_ragged(wrapper, USUAL, device, q_scale=0.5, k_scale=3.0, v_scale=1.5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("qo_len", "kv_len"), [(1, 1), (64, 64), (200, 333), (100, 30), (130, 0)])
def test_single(qo_len, kv_len, causal, backend, device):
    q = randn((qo_len, 6, 64), BF16, device, 1)
    k, v = randn((2, kv_len, 2, 64), BF16, device, 2)
    function = flashinfer.single_prefill_with_kv_cache
    check(function, q=q, k=k, v=v, causal=causal, backend=backend, return_lse=True)
    heads_first = {name: x.transpose(0, 1).contiguous() for name, x in (("k", k), ("v", v))}
    check(
        function,
        q=q,
        **heads_first,
        causal=causal,
        backend=backend,
        kv_layout="HND",
        v_scale=0.5,
        k_scale=2.0,
    )


def test_single_returns_the_lse_under_its_other_name(device):
    q, k, v = randn((3, 64, 2, 64), BF16, device, 1)
    expected = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    got = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_queries_before_the_first_key_see_nothing(backend, device):
    """Causal, aligned to the end: of 7 queries against 4 keys the first three see no key."""
    batch = Batch((7,), (4,), group=1)
    out, lse = plan_paged(batch, device, backend, causal=True).run_return_lse(
        batch.query(device), batch.cache(device)
    )
    assert out[:3].eq(0).all() and lse[:3].eq(float("-inf")).all()
    assert lse[3:].isfinite().all()


def test_out_and_lse_receive_the_results(backend, device):
    wrapper = plan_paged(USUAL, device, backend, causal=True)
    q, cache = USUAL.query(device), USUAL.cache(device)
    expected, expected_lse = wrapper.run(q, cache, return_lse=True)
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), device=device)
    got = wrapper.run(q, cache, out=out, lse=lse, return_lse=True)
    assert got[0] is out and got[1] is lse
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_strided_rows(backend, device):
    """q, k and v as columns of one matrix, as a fused projection leaves them."""
    tokens = sum(QO)
    both = Batch(QO, QO)
    mixed = randn((tokens, 8 + 2 + 2, 128), BF16, device, 3)
    q, k, v = mixed.split([8, 2, 2], 1)
    wrapper = plan_ragged(both, device, backend, causal=True)
    out = torch.empty(tokens, 8, 256, dtype=BF16, device=device)[..., 128:]
    check(type(wrapper).run, self=wrapper, q=q, k=k, v=v, out=out, return_lse=True)


def test_int64_tables_are_converted(device):
    from tests.attention.batches import indptr, workspace

    starts, indices, last, _ = USUAL.table()
    expected = plan_paged(USUAL, device).run(USUAL.query(device), USUAL.cache(device))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    tables = (indptr(QO), starts, indices.to(device), last)
    wrapper.plan(*(t.long() for t in tables), 8, 2, 128, 16, q_data_type=BF16)
    assert torch.equal(wrapper.run(USUAL.query(device), USUAL.cache(device)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_beyond_four_billion_elements(page_size, backend, device):
    """Page number times stride does not fit 32 bits, whichever way pages come."""
    stride = 2**21
    num_pages = 2**32 // stride + 100
    if torch.cuda.mem_get_info()[0] < num_pages * stride * 2 + 2**32:
        pytest.skip("needs 13 GB of free GPU memory")
    batch = Batch((70, 3), (40, 33), page_size=page_size)
    starts, indices, last, few = batch.table()
    near, q = batch.cache(device), batch.query(device)
    expected = plan_paged(batch, device, backend, causal=True).run(q, near)
    storage = torch.empty(num_pages * stride, dtype=BF16, device=device)
    shape = (num_pages, page_size, 2, 128)
    far = [storage.as_strided(shape, (stride, 256, 128, 1), begin) for begin in (0, 8192)]
    for part, values in zip(far, near, strict=True):
        part[num_pages - few :].copy_(values)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
    moved = (indices + num_pages - few).to(device)
    table = (indptr(batch.qo_lens), starts, moved, last)
    wrapper.plan(*table, 8, 2, 128, page_size, causal=True, q_data_type=BF16)
    assert torch.equal(wrapper.run(q, tuple(far)), expected)


def test_ragged_and_paged_agree(backend, device):
    batch = Batch(QO, KV, page_size=1)
    k, v = (torch.randn(sum(KV), 2, 128, device=device).to(BF16) for _ in range(2))
    starts, indices, _, num_pages = batch.table()
    cache = tuple(x.new_zeros(num_pages, 1, 2, 128) for x in (k, v))
    for pages, rows in zip(cache, (k, v), strict=True):
        pages[indices.long().to(device), 0] = rows
    q = batch.query(device)
    paged = plan_paged(batch, device, backend, causal=True).run(q, cache)
    ragged = plan_ragged(batch, device, backend, causal=True).run(q, k, v)
    assert torch.equal(paged, ragged)
