"""Levels of keys: merged, they are attention over all of a query's keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.plan.choice import is_hopper
from tests.attention.batches import BF16, E4M3, E5M2, FP16, indptr, randn, workspace

HEADS, KV_HEADS, HEAD_DIM, PAGE = SIZES = (8, 2, 128, 16)
# Each level's requests: (query tokens, key tokens).
LEVELS = {
    "one": [[(3, 40), (0, 7), (20, 100)]],
    "prefix": [[(6, 500)], [(1, 30), (1, 0), (2, 65), (2, 16)]],
    "three": [[(12, 64)], [(5, 100), (7, 33)], [(2, 9), (3, 40), (6, 6), (1, 0)]],
    "empty": [[(4, 0)], [(1, 0), (3, 20)]],
}


class Cascade:
    """Page tables of levels whose pages lie in random order in one cache."""

    def __init__(
        self,
        levels: list[list[tuple[int, int]]],
        device: torch.device,
        sizes: tuple[int, int, int, int] = SIZES,
    ) -> None:
        self.sizes, page = sizes, sizes[3]
        pages = [[-(-kv // page) for _, kv in level] for level in levels]
        total = sum(map(sum, pages))
        order = torch.randperm(total + 2, generator=torch.Generator().manual_seed(3)).int()
        self.num_pages, self.device = total + 2, device
        self.qo_indptr = [indptr([qo for qo, _ in level]) for level in levels]
        self.kv_indptr = [indptr(counts) for counts in pages]
        counts_of_levels = [sum(counts) for counts in pages]
        self.indices = [part.to(device) for part in order[:total].split(counts_of_levels)]
        self.last = [
            torch.tensor([kv - (-(-kv // page) - 1) * page if kv else 0 for _, kv in level]).int()
            for level in levels
        ]
        self.tokens = int(self.qo_indptr[0][-1])

    def tables(self) -> tuple[Any, ...]:
        return self.qo_indptr, self.kv_indptr, self.indices, self.last

    def plan(
        self,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        backend: str = "auto",
        **options: Any,
    ) -> Any:
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
            len(self.qo_indptr), workspace(self.device), backend=backend
        )
        dtypes = {"q_data_type": dtype, "kv_data_type": kv_dtype}
        wrapper.plan(*self.tables(), *self.sizes, **dtypes, **options)
        return wrapper

    def tensors(
        self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        heads, kv_heads, head_dim, page = self.sizes
        shape = (self.num_pages, page, kv_heads, head_dim)
        cache = tuple(randn(shape, kv_dtype or dtype, self.device, seed) for seed in (1, 2))
        return randn((self.tokens, heads, head_dim), dtype, self.device, 3), cache


def check_cascade(wrapper: Any, q: torch.Tensor, cache: Any, **scales: Any) -> None:
    """Outputs are below 5; each level and the merge round to the dtype."""
    template = type(wrapper).run.__flashinfer_trace__
    inputs = {"self": wrapper, "q": q, "paged_kv_cache": cache, **scales}
    (expected,) = template.compute(inputs)
    actual = wrapper.run(q, cache, **scales)
    assert actual.dtype == wrapper._planned_results[1]
    unit = torch.finfo(actual.dtype).eps
    if q.dtype.itemsize == 1 and is_hopper(q.device):
        unit = 2**-4  # weights may have been rounded to e4m3
    torch.testing.assert_close(actual.double(), expected, rtol=2 * unit, atol=unit)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("levels", LEVELS)
def test_levels(levels, dtype, causal, backend, device):
    cascade = Cascade(LEVELS[levels], device)
    check_cascade(cascade.plan(dtype, backend=backend, causal=causal), *cascade.tensors(dtype))


@pytest.mark.parametrize("options", [{"logits_soft_cap": 3.0}, {"sm_scale": 0.2}], ids=str)
def test_options(options, backend, device):
    cascade = Cascade(LEVELS["three"], device)
    wrapper = cascade.plan(FP16, backend=backend, causal=True, **options)
    check_cascade(wrapper, *cascade.tensors(FP16))


def test_8_bit_keys(device):
    cascade = Cascade(LEVELS["three"], device)
    check_cascade(cascade.plan(BF16, E4M3, causal=True), *cascade.tensors(BF16, E4M3))


@pytest.mark.parametrize("levels", ["one", "three"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_8_bit_queries(dtype, levels, backend, device):
    cascade = Cascade(LEVELS[levels], device)
    wrapper = cascade.plan(dtype, E4M3, backend, causal=True, o_data_type=BF16)
    tensors = cascade.tensors(dtype, E4M3)
    check_cascade(wrapper, *tensors)
    check_cascade(wrapper, *tensors, **scales_of(device))
    check_cascade(wrapper, *tensors, q_scale=0.5, k_scale=1.5, v_scale=0.75)
    with pytest.raises(ValueError, match="`o_data_type`"):
        cascade.plan(dtype, E4M3, backend)


def scales_of(device: torch.device) -> dict[str, Any]:
    """Scales: one for each query head, one for all keys, one for each head of values."""
    queries = torch.linspace(0.5, 1.5, HEADS, dtype=torch.float32, device=device)
    values = torch.tensor([0.75, 0.5], device=device)
    return {"q_scale": queries, "k_scale": torch.tensor([1.25], device=device), "v_scale": values}


@pytest.mark.parametrize("window", [0, 20])
def test_one_level_has_all_options(window, backend, device):
    cascade = Cascade(LEVELS["one"], device)
    options = {"window_left": window, "pos_encoding_mode": "ALIBI", "causal": True}
    check_cascade(cascade.plan(FP16, backend=backend, **options), *cascade.tensors(FP16))


def test_levels_agree_with_the_whole(device):
    """The same keys as one level: pages of the prefix in front of each request's own."""
    prefix = 32
    cascade = Cascade([[(6, prefix)], [(1, 30), (1, 5), (2, 65), (2, 16)]], device)
    q, cache = cascade.tensors(FP16)
    upper = cascade.indices[0]
    own = cascade.indices[1].split(cascade.kv_indptr[1].diff().tolist())
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(
        cascade.qo_indptr[1],
        indptr([len(upper) + len(pages) for pages in own]),
        torch.cat([torch.cat([upper, pages]) for pages in own]),
        cascade.last[1],
        *(HEADS, KV_HEADS, HEAD_DIM, PAGE),
        causal=True,
    )
    whole = wrapper.run(q, cache)
    merged = cascade.plan(FP16, causal=True).run(q, cache)
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-3 * float(whole.abs().max()))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_shared_prefix(kv_layout, backend, device):
    """The deprecated wrappers do what two levels do; the prefix is rows in place of pages."""
    cascade = Cascade([[(4, 48)], [(1, 30), (1, 0), (1, 65), (1, 16)]], device)
    q, cache = cascade.tensors(FP16)
    expected = cascade.plan(FP16).run(q, cache)
    k, v = (part[cascade.indices[0].long()].flatten(0, 1) for part in cache)
    if kv_layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        cache = tuple(part.transpose(1, 2).contiguous() for part in cache)
    sizes = (HEADS, KV_HEADS, HEAD_DIM, PAGE)
    table = (cascade.kv_indptr[1], cascade.indices[1], cascade.last[1])
    close = {"rtol": 2**-8, "atol": 2**-9}
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(
        workspace(device), kv_layout, backend
    )
    decode.begin_forward(*table, *sizes)
    torch.testing.assert_close(decode.forward(q, k, v, cache), expected, **close)
    prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
        workspace(device), kv_layout, backend
    )
    prefill.begin_forward(cascade.qo_indptr[1], *table, *sizes)
    torch.testing.assert_close(prefill.forward(q, k, v, cache), expected, **close)
    scaled = prefill.forward(q, k, v, cache, sm_scale=0.3)
    assert not torch.allclose(scaled, expected, **close)


def test_causal_shared_prefix(device):
    cascade = Cascade([[(9, 48)], [(4, 30), (5, 65)]], device)
    q, cache = cascade.tensors(FP16)
    expected = cascade.plan(FP16, causal=True).run(q, cache)
    k, v = (part[cascade.indices[0].long()].flatten(0, 1) for part in cache)
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device))
    table = (cascade.qo_indptr[1], cascade.kv_indptr[1], cascade.indices[1], cascade.last[1])
    wrapper.begin_forward(*table, HEADS, KV_HEADS, HEAD_DIM, PAGE)
    actual = wrapper.forward(q, k, v, cache, causal=True)
    torch.testing.assert_close(actual, expected, rtol=2**-8, atol=2**-9)


def test_shared_prefix_of_8_bit_queries(backend, device):
    cascade = Cascade([[(4, 48)], [(1, 30), (1, 65), (1, 1), (1, 16)]], device)
    q, cache = cascade.tensors(E4M3)
    plan = cascade.plan(E4M3, o_data_type=BF16)
    k, v = (part[cascade.indices[0].long()].flatten(0, 1) for part in cache)
    table = (cascade.kv_indptr[1], cascade.indices[1], cascade.last[1])
    sizes = (HEADS, KV_HEADS, HEAD_DIM, PAGE)
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(
        workspace(device), "NHD", backend
    )
    decode.begin_forward(*table, *sizes, q_data_type=E4M3, o_data_type=BF16)
    prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
        workspace(device), "NHD", backend
    )
    prefill.begin_forward(cascade.qo_indptr[1], *table, *sizes)
    for scales in ({}, scales_of(device), {"q_scale": 0.5, "k_scale": 1.5, "v_scale": 0.75}):
        expected = plan.run(q, cache, **scales)
        close = {"rtol": 2**-3, "atol": 2**-3} if is_hopper(q.device) else {"rtol": 2**-6}
        close.setdefault("atol", 2**-7)
        actual = decode.forward(q, k, v, cache, **scales)
        torch.testing.assert_close(actual, expected, **close)
        actual = prefill.forward(q, k, v, cache, **scales, o_data_type=BF16)
        torch.testing.assert_close(actual, expected, **close)


@pytest.mark.gpu
def test_one_graph_serves_every_cascade(backend, device):
    requests, pages = 6, 64

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    buffers = [[zeros(n) for _ in range(2)] for n in (requests + 1, requests + 1, pages, requests)]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, workspace(device), "NHD", True, *buffers, backend=backend
    )
    shape = (pages, PAGE, KV_HEADS, HEAD_DIM)
    cache = tuple(randn(shape, FP16, device, seed) for seed in (1, 2))
    q = randn((6, HEADS, HEAD_DIM), FP16, device, 3)
    sizes = (HEADS, KV_HEADS, HEAD_DIM, PAGE)

    wrapper.plan(*Cascade(LEVELS["prefix"], device).tables(), *sizes)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wrapper.run(q, cache)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(q, cache)
    for levels in ([[(6, 100)], [(2, 33), (4, 9)]], [[(2, 300), (4, 1)], [(1, 7)] * 6]):
        cascade = Cascade(levels, device)
        wrapper.plan(*cascade.tables(), *sizes)
        out.fill_(float("nan"))
        graph.replay()
        expected = cascade.plan(FP16).run(q, cache)
        torch.testing.assert_close(out, expected, rtol=2**-8, atol=2**-9)
