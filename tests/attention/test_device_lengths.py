"""Decode by lengths in device memory: divided there, eagerly and in captured graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from tests.attention.batches import (
    BF16,
    E4M3,
    FP16,
    Batch,
    indptr,
    plan_paged,
    randn,
    workspace,
)

pytestmark = pytest.mark.gpu

WIDTH = 300  # pages of a request
LENGTHS = [
    (700, 0, 64, 33, 1, 4000),
    (1, 1, 1, 1, 1, 1),
    (4800, 4800, 4800, 4800, 4800, 4800),
    (0, 0, 0, 0, 0, 3000),
    (130, 257, 2048, 4799, 16, 15),
]


class Tables:
    """A cache, and the tensors on the GPU that say which of it is whose."""

    def __init__(self, device: torch.device, num_requests: int = 6, **fields: Any) -> None:
        self.device = device
        self.shape = Batch((1,), (1,), **fields)
        shape = self.shape
        self.num_pages = num_requests * WIDTH // 4
        inner = [shape.page_size, shape.num_kv_heads]
        inner = inner if shape.kv_layout == "NHD" else inner[::-1]
        self.cache = tuple(
            randn((self.num_pages, *inner, dim), torch.float32, device, seed).to(shape.stored)
            for seed, dim in enumerate((shape.head_dim_qk, shape.head_dim_vo))
        )
        generator = torch.Generator().manual_seed(3)
        pages = torch.randint(self.num_pages, (num_requests, WIDTH), generator=generator)
        self.block_tables = pages.int().to(device)
        self.seq_lens = torch.zeros(num_requests, dtype=torch.int32, device=device)

    def arguments(self, q: torch.Tensor) -> dict[str, Any]:
        return {
            "query": q,
            "kv_cache": self.cache,
            "workspace_buffer": workspace(self.device),
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "max_seq_len": WIDTH * self.shape.page_size,
            "bmm1_scale": 0.09,
            "kv_layout": self.shape.kv_layout,
        }

    def expected(self, q: torch.Tensor, starts: torch.Tensor, **options: Any) -> Any:
        """The result of a wrapper that is planned on the host."""
        shape = self.shape
        lengths = self.seq_lens.cpu()
        counts = (lengths + shape.page_size - 1) // shape.page_size
        pages = [row[:n] for row, n in zip(self.block_tables.cpu(), counts.tolist(), strict=True)]
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace(self.device), shape.kv_layout, backend="fa2"
        )
        wrapper.plan(
            starts,
            indptr(counts.tolist()),
            torch.cat(pages).to(self.device),
            (lengths - (counts - 1) * shape.page_size).int().clamp(max=shape.page_size),
            *(shape.num_qo_heads, shape.num_kv_heads, shape.head_dim_qk, shape.page_size),
            causal=True,
            sm_scale=0.09,
            **shape.dtypes(),
            **options,
        )
        return wrapper.run(q, self.cache, return_lse=True)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.016, atol=2e-3)


def captured(call: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("function", [trtllm_batch_decode_with_kv_cache, None])
def test_a_captured_call_follows_the_lengths(function, tokens, device):
    tables = Tables(device)
    q = randn((6 * tokens, 8, 128), BF16, device)
    call = function or xqa_batch_decode_with_kv_cache
    arguments = tables.arguments(q)
    graph, out = captured(lambda: call(**arguments, q_len_per_req=tokens, window_left=2000))
    for seed, lengths in enumerate(LENGTHS):
        tables.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        tables.block_tables.copy_(tables.block_tables.roll(1, 0))
        q.copy_(randn(q.shape, BF16, device, seed))
        graph.replay()
        starts = torch.arange(7, dtype=torch.int32) * tokens
        expected, _ = tables.expected(q, starts, window_left=2000)
        close(out, expected)


def test_a_captured_call_with_rows_by_cumulative_lengths(device):
    tables = Tables(device, group=7, num_kv_heads=3)
    starts = torch.zeros(7, dtype=torch.int32, device=device)
    q = randn((20, 21, 128), BF16, device)
    arguments = tables.arguments(q) | {"cum_seq_lens_q": starts, "max_q_len": 10}
    graph, (out, lse) = captured(
        lambda: trtllm_batch_decode_with_kv_cache(**arguments, return_lse=True)
    )
    for rows in ((1, 2, 3, 4, 0, 10), (0, 0, 0, 0, 0, 0), (10, 0, 10, 0, 0, 0)):
        tables.seq_lens.copy_(torch.tensor((700, 30, 2000, 33, 1, 4000), dtype=torch.int32))
        starts.copy_(indptr(rows))
        graph.replay()
        count = sum(rows)
        expected, expected_lse = tables.expected(q[:count], starts.cpu())
        close(out[:count], expected)
        close(lse[:count], expected_lse)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("tokens", [2, 16])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_captured_mask_of_drafts(group, tokens, is_ragged, device):
    """Against the plan on the host, which has a bit for each query and key."""
    tables = Tables(device, group=group)
    starts = indptr([2, tokens, 0, 1, tokens, 2] if is_ragged else [tokens] * 6).to(device)
    q = randn((int(starts[-1]), 2 * group, 128), BF16, device)
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(2**tokens, (len(q), 1), generator=generator, dtype=torch.int32) | 1
    mask = words.to(device).view(torch.uint16)
    tables.seq_lens.copy_(torch.tensor((700, 64, 33, 4000, tokens, 79), dtype=torch.int32))
    arguments = tables.arguments(q) | {"q_len_per_req": tokens, "mask": mask}
    if is_ragged:
        arguments["q_cu_seq_lens"] = starts
    graph, out = captured(lambda: xqa_batch_decode_with_kv_cache(**arguments, window_left=3000))
    for _ in range(2):
        graph.replay()
        lengths = {"seq_lens": tables.seq_lens.cpu()}
        if is_ragged:
            lengths["q_cu_seq_lens"] = starts.cpu()
        expected = xqa_batch_decode_with_kv_cache(**arguments | lengths, window_left=3000)
        close(out, expected)
        mask.copy_(words.flip(0).to(device).view(torch.uint16))
        tables.seq_lens.add_(11)


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_dtype": E4M3, "kv_layout": "HND"},
        {"dtype": FP16, "head_dim_qk": 256, "head_dim_vo": 256, "page_size": 1},
        {"group": 1, "num_kv_heads": 40, "head_dim_qk": 64, "head_dim_vo": 64},
        {"group": 48, "num_kv_heads": 1},
        {"head_dim_qk": 512, "head_dim_vo": 512},
        {"head_dim_qk": 448, "head_dim_vo": 448, "group": 7, "kv_dtype": E4M3},
    ],
    ids=str,
)
def test_shapes(fields, device):
    tables = Tables(device, **fields)
    shape = tables.shape
    q = randn((12, shape.num_qo_heads, shape.head_dim_qk), shape.dtype, device)
    lengths = torch.tensor((299, 0, 64, 33, 1, 250), dtype=torch.int32)
    tables.seq_lens.copy_(lengths)
    found = trtllm_batch_decode_with_kv_cache(**tables.arguments(q), q_len_per_req=2)
    starts = torch.arange(7, dtype=torch.int32) * 2
    close(found, tables.expected(q, starts)[0])


@pytest.mark.parametrize("tokens", [1, 2])
def test_lengths_that_the_kernel_before_writes(tokens, device):
    """A dependent launch waits for it, and for the page numbers and queries, too."""
    tables = Tables(device)
    q = randn((6 * tokens, 8, 128), BF16, device)
    pages, starts = tables.block_tables.clone(), torch.arange(7, dtype=torch.int32) * tokens
    given = torch.tensor((700, 2, 64, 33, 17, 4000), dtype=torch.int32, device=device)
    arguments = tables.arguments(q) | {"q_len_per_req": tokens, "enable_pdl": True}

    def step() -> torch.Tensor:
        tables.block_tables.zero_()
        tables.seq_lens.zero_()
        trtllm_batch_decode_with_kv_cache(**arguments)
        tables.block_tables.copy_(pages)
        tables.seq_lens.copy_(given)
        return trtllm_batch_decode_with_kv_cache(**arguments)

    graph, out = captured(step)
    expected, _ = tables.expected(q, starts)
    for _ in range(20):
        graph.replay()
        close(out, expected)


def test_lengths_and_offsets_without_sense_stay_inside(device):
    """No value leads a kernel out of its tensors; rows of sane requests are right."""
    tables = Tables(device)
    q = randn((6, 8, 128), BF16, device)
    tables.seq_lens.copy_(torch.tensor((700, -5, 2**31 - 1, 33, -(2**31), 4000)))
    found = trtllm_batch_decode_with_kv_cache(**tables.arguments(q))
    tables.seq_lens.copy_(torch.tensor((700, 0, WIDTH * 16, 33, 0, 4000)))
    expected, _ = tables.expected(q, torch.arange(7, dtype=torch.int32))
    close(found, expected)


def test_a_long_batch_is_balanced_and_repeats_bit_for_bit(device):
    tables = Tables(device, 300)
    generator = random.Random(4)
    lengths = [generator.choice([0, 10, 300, 4000]) for _ in range(300)]
    tables.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
    q = randn((300, 8, 128), BF16, device)
    first = trtllm_batch_decode_with_kv_cache(**tables.arguments(q))
    close(first, tables.expected(q, torch.arange(301, dtype=torch.int32))[0])
    for _ in range(50):
        assert torch.equal(trtllm_batch_decode_with_kv_cache(**tables.arguments(q)), first)


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_fast_plans_take_bounds(use_cuda_graph, device):
    """The host knows bounds of the lengths, the kernels read the lengths."""
    batch = Batch((1,) * 4, (700, 40, 5, 3000))
    starts, pages, last, _ = batch.table()
    options: dict[str, Any] = {}
    if use_cuda_graph:
        options["paged_kv_indptr_buffer"] = torch.zeros(5, dtype=torch.int32, device=device)
        options["paged_kv_indices_buffer"] = torch.zeros(999, dtype=torch.int32, device=device)
        options["paged_kv_last_page_len_buffer"] = torch.ones(4, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), use_cuda_graph=use_cuda_graph, **options
    )
    table = (starts.to(device), pages.to(device), last.to(device))
    plan = {"q_data_type": BF16, "global_override_indptr_cpu": starts + torch.arange(5) * 9}
    flashinfer.fast_decode_plan(wrapper, *table, 8, 2, 128, 16, **plan)
    q, cache = batch.query(device), batch.cache(device)
    exact = plan_paged(batch, device, causal=True).run(q, cache)
    close(wrapper.run(q, cache), exact)


def test_what_a_device_plan_has_no_room_for_is_refused(device):
    tables = Tables(device)
    q = randn((6, 8, 128), BF16, device)
    arguments = tables.arguments(q)
    for name, value in (
        ("block_tables", torch.zeros(6, 4, device=device)),
        ("block_tables", torch.zeros(5, 4, dtype=torch.int32, device=device)),
        ("workspace_buffer", torch.zeros(64, dtype=torch.uint8, device=device)),
        ("q_len_per_req", 0),
        ("max_seq_len", 1.5),
    ):
        own = "workspace" if name == "workspace_buffer" else name
        with pytest.raises((TypeError, ValueError), match=own):
            trtllm_batch_decode_with_kv_cache(**{**arguments, name: value})
    with pytest.raises(ValueError, match="mask"):
        xqa_batch_decode_with_kv_cache(**arguments, mask=torch.ones(4, device=device))
