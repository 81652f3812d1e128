"""The planner of latent attention: tiles see their KV once, shares are even, parts are merged."""

from __future__ import annotations

import gc
import random
import struct
import weakref
from typing import Any, NamedTuple

import pytest
import torch

from flashinfer.jit.attention.mla import MlaPlanner
from flashinfer.mla import BatchMLAPagedAttentionWrapper

pytestmark = pytest.mark.compiler

CTAS, ROWS, STEP = 132, 64, 128  # of a plan without a GPU; of a tile; tokens that are taken at once


class Item(NamedTuple):
    qo_begin: int
    qo_len: int
    kv_base: int
    kv_len: int
    row_begin: int
    kv_begin: int
    kv_end: int
    slot: int
    merge: int


class Merge(NamedTuple):
    qo_begin: int
    qo_len: int
    row_begin: int
    slot_begin: int
    num_parts: int
    slot_stride: int


def aligned(size: int) -> int:
    return -(-size // 128) * 128


def plan(
    qo_lens: list[int], kv_lens: list[int], num_heads: int, causal: bool, splits: bool = True
) -> tuple[list[list[Item]], list[Merge]]:
    """Items of each CTA, and merges, as a launch would read them."""
    workspace = torch.full((8 << 20,), 0xFF, dtype=torch.uint8)
    planner = MlaPlanner()

    def indptr(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    pages = [-(-n // 16) for n in kv_lens]
    planner.make(
        *(workspace, 1 << 40, indptr(qo_lens), indptr(pages), lengths),
        *(num_heads, 512, 16, causal, splits),
    )
    data = workspace.numpy().tobytes()
    num_merges, num_items = struct.unpack_from("2i", data)
    starts_at = aligned(16)
    merges_at = aligned(starts_at + 4 * (CTAS + 1))
    counters_at = aligned(merges_at + 32 * CTAS)
    items_at = aligned(counters_at + 8 * CTAS)
    assert not any(data[counters_at:items_at])
    starts = struct.unpack_from(f"{CTAS + 1}i", data, starts_at)
    assert starts[0] == 0 and starts[-1] == num_items
    items = [Item(*struct.unpack_from("7i2h", data, items_at + 32 * i)) for i in range(num_items)]
    for a, b in zip(starts, starts[1:], strict=False):  # only these two can be parts
        assert all(item.slot < 0 for item in items[a + 1 : b - 1])
    merges = [Merge(*struct.unpack_from("6i", data, merges_at + 32 * i)) for i in range(num_merges)]
    return [items[a:b] for a, b in zip(starts, starts[1:], strict=False)], merges


def visible(qo_len: int, kv_len: int, last_row: int, num_heads: int, causal: bool) -> int:
    return max(0, kv_len - qo_len + last_row // num_heads + 1) if causal else kv_len


def check(qo_lens: list[int], kv_lens: list[int], num_heads: int, causal: bool) -> Any:
    lists, merges = plan(qo_lens, kv_lens, num_heads, causal)
    parts: dict[tuple[int, int], list[Item]] = {}
    for items in lists:
        for item in items:
            parts.setdefault((item.qo_begin, item.row_begin), []).append(item)
    slots = [item.slot for items in lists for item in items if item.slot >= 0]
    assert len(slots) == len(set(slots)) and max(slots, default=0) < 2 * CTAS + 8
    merged = {(m.qo_begin, m.row_begin): m for m in merges}
    assert len(merged) == len(merges) <= CTAS
    tiles = set()
    first = 0
    for qo_len, kv_len in zip(qo_lens, kv_lens, strict=True):
        rows = qo_len * num_heads
        for row in range(0, rows, ROWS):
            tiles.add((first, row))
            pieces = sorted(parts[first, row], key=lambda item: item.kv_begin)
            end = visible(qo_len, kv_len, min(row + ROWS, rows) - 1, num_heads, causal)
            covered = 0
            for piece in pieces:
                assert (piece.qo_len, piece.kv_len) == (qo_len, kv_len)
                assert piece.kv_begin == covered or piece.kv_begin == piece.kv_end
                covered = max(covered, piece.kv_end)
                assert piece.kv_begin % STEP == 0 or piece.kv_begin == piece.kv_end
            assert covered == end
            merge = merged.get((first, row))
            if merge is None:
                assert len(pieces) == 1 and pieces[0].slot < 0
            else:
                expected = [
                    merge.slot_begin + i * merge.slot_stride for i in range(merge.num_parts)
                ]
                assert sorted(piece.slot for piece in pieces) == sorted(expected)
                assert {piece.merge for piece in pieces} == {merges.index(merge)}
        first += qo_len
    assert tiles == set(parts) and set(merged) <= tiles
    return lists


@pytest.mark.parametrize("num_heads", [8, 16, 20, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_random_batches(num_heads: int, causal: bool):
    random.seed(num_heads)
    for _ in range(20):
        batch = random.choice([1, 2, 5, 40, 200])
        longest = random.choice([10, 1000, 20000])
        most = random.choice([1, 1, 3, 70])
        qo_lens = [random.randint(0, most) for _ in range(batch)]
        kv_lens = [random.randint(0, longest) for _ in range(batch)]
        check(qo_lens, kv_lens, num_heads, causal)


def test_a_wrapper_ends_with_its_last_reference():
    """A collection would end it at any time, within a capture, too."""
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(64 << 20, dtype=torch.uint8))
    indptr = torch.arange(3, dtype=torch.int32)
    lengths, types = torch.tensor([200, 100], dtype=torch.int32), (torch.bfloat16, torch.bfloat16)
    wrapper.plan(
        indptr, indptr * 4, torch.arange(8).int(), lengths, 16, 512, 64, 64, True, 1, *types
    )
    assert wrapper._cached_module is not None
    planner, was_enabled = weakref.ref(wrapper._planner), gc.isenabled()
    gc.disable()
    try:
        del wrapper
        assert planner() is None
    finally:
        if was_enabled:
            gc.enable()


def test_shares_are_even():
    """One long request is cut over all columns of two CTAs; none has more than its share."""
    lists = check([1], [100_000], 128, False)
    steps = [sum(-(-(i.kv_end - i.kv_begin) // STEP) for i in items) for items in lists]
    total = -(-100_000 // STEP)
    assert min(steps) > 0 and max(steps) == -(-total // (CTAS // 2))


def test_tiles_of_a_token_are_neighbours():
    """So that both read the KV rows while these are in L2."""
    lists = check([1] * 4, [4096] * 4, 128, False)
    for left, right in zip(lists[::2], lists[1::2], strict=True):
        assert [(i.kv_base, i.kv_begin, i.kv_end) for i in left] == [
            (i.kv_base, i.kv_begin, i.kv_end) for i in right
        ]


def test_without_splits_no_tile_is_cut():
    lists, merges = plan([1] * 3, [20_000, 5, 0], 16, False, splits=False)
    assert not merges and all(item.slot < 0 for items in lists for item in items)
    assert sum(map(len, lists)) == 3


def test_empty_batch():
    lists, merges = plan([], [], 16, False)
    assert not merges and not any(lists)


@pytest.mark.parametrize("num_sms", [8, 48, 1000], ids=str)
def test_work_is_divided_for_so_many_multiprocessors(num_sms):
    """As many lists as multiprocessors of the GPU; later plans of a graph keep the number."""
    workspace = torch.zeros(8 << 20, dtype=torch.uint8)
    planner = MlaPlanner()
    ctas, requests, tokens = min(num_sms, CTAS), 264, 1024
    first = torch.arange(requests + 1, dtype=torch.int32)
    lengths = torch.full((requests,), tokens, dtype=torch.int32)
    batch = first, first * (tokens // 16), lengths

    def make(is_graph: bool, count: int) -> list[int]:
        sizes = 16, 512, 16, False, True, is_graph, count
        planner.make(workspace, 1 << 40, *batch, *sizes)
        return torch.frombuffer(workspace.numpy(), dtype=torch.int32, offset=128).tolist()

    for is_graph, count in ((False, num_sms), (True, 16), (False, num_sms), (True, num_sms)):
        starts = make(is_graph, count)[: ctas + 1]
        (num_items,) = struct.unpack_from("4xi", workspace.numpy().tobytes())
        assert starts[0] == 0 and starts[-1] == num_items >= requests
        items = torch.tensor(starts).diff()
        assert items.min() >= 1 and items.max() - items.min() <= 2
