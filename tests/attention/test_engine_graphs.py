"""Captured steps as serving engines write them: caches of tokens, older names, own buffers.

The engine keeps pages of one token, index tensors on the GPU that the wrappers were made with, and
says scale and causality in `forward`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import flashinfer
from tests.attention.batches import BF16, indptr, randn, workspace

pytestmark = pytest.mark.gpu

BATCH, TOKENS, SLOTS = 4, 12, 2000
HEADS = (8, 2, 128, 1)  # of queries, of keys, elements, tokens of a page
LENGTHS = [(1, 1, 1, 1), (700, 3, 64, 1), (90, 91, 92, 93), (5, 1200, 1, 17)]


def zeros(count: int, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


class Engine:
    """The buffers that an engine's graphs read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kv_indptr, self.qo_indptr = zeros(9, device), zeros(9, device)
        self.pages, self.mask_indptr = zeros(SLOTS, device), zeros(9, device)
        self.mask = zeros(SLOTS * TOKENS, device, torch.uint8)
        self.last = torch.ones(8, dtype=torch.int32, device=device)
        shape = (SLOTS, *HEADS[1:3])
        self.cache = tuple(randn(shape, BF16, device, seed) for seed in (1, 2))
        self.workspace = workspace(device)

    def table(self, lengths: tuple[int, ...], seed: int) -> torch.Tensor:
        """Write the table of requests of these lengths where graphs read it; indptr on the host."""
        starts = indptr(lengths)
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed)).int()
        self.pages[: starts[-1]] = order[: starts[-1]].to(self.device)
        self.kv_indptr[: BATCH + 1] = starts.to(self.device)
        return starts


def capture(step: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def test_decoding_with_the_fast_plan_in_place_of_begin_forward(device):
    engine = Engine(device)
    wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        engine.workspace,
        "NHD",
        backend="fa2",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=engine.kv_indptr[: BATCH + 1],
        paged_kv_indices_buffer=engine.pages,
        paged_kv_last_page_len_buffer=engine.last[:BATCH],
    )
    eager = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD")
    options = {"data_type": BF16, "q_data_type": BF16, "non_blocking": True}
    options |= {"fixed_split_size": None, "disable_split_kv": False}
    table = (engine.kv_indptr[: BATCH + 1], wrapper._paged_kv_indices_buf, engine.last[:BATCH])
    q = randn((BATCH, 8, 128), BF16, device)
    scales = {"sm_scale": 0.07, "logits_soft_cap": 0.0, "k_scale": 1.0, "v_scale": 1.0}

    engine.table(LENGTHS[0], 0)
    wrapper.begin_forward(*table, *HEADS, **options)
    wrapper.begin_forward = functools.partial(flashinfer.fast_decode_plan, wrapper)
    graph, out = capture(lambda: wrapper.forward(q, engine.cache, **scales))
    for seed, lengths in enumerate(LENGTHS):
        starts = engine.table(lengths, seed)
        wrapper.begin_forward(*table, *HEADS, **options, global_override_indptr_cpu=starts)
        q.copy_(randn((BATCH, 8, 128), BF16, device, seed))
        graph.replay()
        eager.begin_forward(*table, *HEADS, **options)
        expected = eager.forward(q, engine.cache, **scales)
        torch.testing.assert_close(out.float(), expected.float(), rtol=0.01, atol=2e-3)


def test_verifying_drafts_with_a_mask(device):
    """The graph is captured with the mask of a larger batch, `causal` is said and means nothing."""
    engine = Engine(device)
    drafts = TOKENS // BATCH
    engine.qo_indptr[: BATCH + 1] = indptr((drafts,) * BATCH).to(device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        engine.workspace,
        "NHD",
        use_cuda_graph=True,
        backend="fa2",
        qo_indptr_buf=engine.qo_indptr[: BATCH + 1],
        paged_kv_indptr_buf=engine.kv_indptr[: BATCH + 1],
        paged_kv_indices_buf=engine.pages,
        paged_kv_last_page_len_buf=engine.last[:BATCH],
        custom_mask_buf=engine.mask,
        mask_indptr_buf=engine.mask_indptr[: BATCH + 1],
    )
    eager = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend="fa2")
    table = (engine.qo_indptr[: BATCH + 1], engine.kv_indptr[: BATCH + 1])
    q = randn((TOKENS, 8, 128), BF16, device)
    forward = {"causal": True, "sm_scale": 0.07, "window_left": -1, "logits_soft_cap": 0.0}
    dtypes = {"q_data_type": BF16, "kv_data_type": BF16}

    engine.table((drafts,) * BATCH, 0)
    largest = torch.ones(SLOTS * TOKENS, dtype=torch.bool, device=device)
    arguments = (*table, engine.pages, engine.last[:BATCH], *HEADS)
    wrapper.begin_forward(*arguments, **dtypes, custom_mask=largest)
    graph, out = capture(lambda: wrapper.forward(q, engine.cache, **forward))
    for seed, lengths in enumerate(LENGTHS):
        starts = engine.table(lengths, seed)
        pages = engine.pages[: starts[-1]].clone()
        mask = randn((int(starts[-1]) * drafts,), torch.float32, device, seed) > 0
        wrapper.begin_forward(
            *table, pages, engine.last[:BATCH], *HEADS, **dtypes, custom_mask=mask
        )
        q.copy_(randn((TOKENS, 8, 128), BF16, device, seed))
        graph.replay()
        eager.begin_forward(*table, pages, engine.last[:BATCH], *HEADS, **dtypes, custom_mask=mask)
        expected = eager.forward(q, engine.cache, **forward)
        torch.testing.assert_close(out.float(), expected.float(), rtol=0.01, atol=2e-3)
        if max(lengths) > 1:
            other = eager.forward(q, engine.cache, **{**forward, "sm_scale": 1.0})
            assert not torch.equal(expected, other)
