"""How attention plans share the work, from the compiled planner."""

from __future__ import annotations

import dataclasses
import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.attention_plans import (
    FUZZ,
    TILE_KV,
    Options,
    Plan,
    Requests,
    make_plan,
)

pytestmark = pytest.mark.compiler


def kv_tiles(plan: Plan, tile_kv: int = TILE_KV) -> list[int]:
    """KV tiles of each column."""
    tiles = -(-(plan.items["kv_end"] - plan.items["kv_begin"]) // tile_kv)
    return [int(tiles[column].sum()) for column in plan.columns]


MIXED = random.Random(5)
BATCHES = {
    "64 x 8192": [8192] * 64,
    "256 x 2048": [2048] * 256,
    "16 x 8192": [8192] * 16,
    "1 x 131072": [131072],
    "mixed": [MIXED.randint(1, 16384) for _ in range(64)],
    "one 64 times longer": [2048] * 63 + [131072],
    "one 64 times longer, first": [131072] + [2048] * 63,
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("group_size", [4, 7])
@pytest.mark.parametrize("name", BATCHES)
def test_decode_is_balanced(name, group_size, graph):
    """No column has over 5 % more than an equal share, with the columns that the GPU has."""
    lengths = BATCHES[name]
    options = Options(group_size=group_size)
    if graph:
        options = dataclasses.replace(
            options, graph_batch_size=len(lengths), graph_qo_tokens=len(lengths)
        )
    plan = make_plan(options, Requests(1, tuple(lengths)))
    columns = options.cta_slots // options.num_kv_heads
    loads = kv_tiles(plan)
    assert len(loads) <= columns
    assert max(loads) <= 1.05 * sum(loads) / columns


@pytest.mark.parametrize("length", [64, 1024, 4096, 8192])
def test_few_short_requests_are_cut_into_few_parts(length):
    """One request fills the GPU only as far as parts stay worth their start."""
    plan = make_plan(Options(), Requests(1, (length,)))
    loads = kv_tiles(plan)
    assert min(loads) >= min(2, length // TILE_KV) and max(loads) <= 4
    assert plan.info["num_merges"] == (len(loads) > 1)


@pytest.mark.parametrize("batch_size", [49, 98, 147])
def test_what_is_balanced_as_it_is_is_not_cut(batch_size):
    plan = make_plan(Options(), Requests(1, (4096,) * batch_size))
    assert plan.info["num_merges"] == 0 and plan.info["float_bytes"] == 0
    assert len(plan.items) == batch_size


@FUZZ
@given(
    st.lists(st.integers(0, 200_000), min_size=1, max_size=40),
    st.sampled_from([(1, 396), (4, 99), (8, 49), (24, 33)]),
)
def test_no_column_is_far_above_an_equal_share(lengths, heads_and_columns):
    """Whatever the lengths: with a piece counted as one KV tile more, the GPU is done within 4 %
    and 4 KV tiles of an equal share of all columns; 4 KV tiles are never cut.
    """
    num_kv_heads, columns = heads_and_columns
    options = Options(num_kv_heads=num_kv_heads)
    plan = make_plan(options, Requests(1, tuple(lengths)))
    assert plan.info["num_merges"] == 0 or len(plan.columns) <= columns
    last, _ = makespan(plan, num_kv_heads, options.cta_slots, TILE_KV)
    pieces = sum(-(-n // TILE_KV) + 1 for n in lengths) + columns
    assert last <= max(5, 1.04 * num_kv_heads * pieces / options.cta_slots + 4)


def test_what_fills_the_memory_without_a_cut_is_not_cut():
    """16 requests with 8 heads are one CTA on each multiprocessor that would hold two."""
    requests = Requests(1, (8192,) * 16)
    cut = make_plan(Options(cta_slots=264), requests)
    assert cut.info["num_merges"] == 16 and len(cut.columns) == 32
    whole = make_plan(Options(cta_slots=264, lone_speed=2), requests)
    assert whole.info["num_merges"] == 0 and len(whole.columns) == 16


def test_a_long_request_has_no_more_parts_than_fill_the_memory():
    for tokens, parts in ((131072, 16), (16384, 32)):
        plan = make_plan(Options(cta_slots=264, lone_speed=2), Requests(1, (tokens,)))
        assert len(plan.columns) == parts


def memory_time(loads: list[int], columns: int, lone_speed: int) -> float:
    """When the last column ends of those that `columns` take in order, in KV tiles.

    The memory serves all that run alike, and none more than `lone_speed` times as fast as among
    `columns`.
    """
    waiting, running, time = list(loads), [], 0.0
    while waiting or running:
        taken = columns - len(running)
        running = sorted([*running, *waiting[:taken]])
        waiting = waiting[taken:]
        speed = min(lone_speed, columns / len(running))
        time += running[0] / speed
        running = [left - running[0] for left in running if left > running[0]]
    return time


@FUZZ
@given(
    st.lists(st.integers(0, 20_000), min_size=1, max_size=120),
    st.sampled_from([(1, 132), (8, 33), (24, 11)]),
    st.sampled_from([2, 3]),
)
def test_whole_tiles_share_the_memory(lengths, heads_and_columns, lone_speed):
    """Whatever the lengths, the last column ends within 5 % and 4 KV tiles of an equal share."""
    num_kv_heads, columns = heads_and_columns
    options = Options(
        num_kv_heads=num_kv_heads, cta_slots=num_kv_heads * columns, lone_speed=lone_speed
    )
    plan = make_plan(options, Requests(1, tuple(lengths)))
    loads = [load + len(c) for load, c in zip(kv_tiles(plan), plan.columns, strict=True)]
    share = (sum(-(-n // TILE_KV) + 1 for n in lengths) + columns) / columns
    assert memory_time(loads, columns, lone_speed) <= max(5, 1.05 * share + 4)


def test_long_tiles_come_first():
    """Causal prefill: one tile per column, by falling cost, ties in order of requests."""
    options = Options(tile_q=128, cta_slots=264)
    plan = make_plan(options, Requests((2048,) * 8, (2048,) * 8, page_size=0, causal=True))
    assert plan.columns == [[i] for i in range(512)] and plan.info["num_merges"] == 0
    loads = kv_tiles(plan)
    assert loads == sorted(loads, reverse=True)
    for cost in set(loads):
        keys = [
            (i["request"], i["row_begin"])
            for i, n in zip(plan.items, loads, strict=True)
            if n == cost
        ]
        assert keys == sorted(keys)


def test_a_long_chunk_over_few_rows_is_cut():
    """Prefill with too few tiles for the GPU: 512 new tokens after 32768."""
    plan = make_plan(Options(tile_q=128, cta_slots=264), Requests((512,), (32768,), causal=True))
    loads = kv_tiles(plan)
    assert len(loads) == 33 and max(loads) <= 1.05 * sum(loads) / 33


def test_short_prompts_do_not_keep_a_long_request_in_one_piece():
    """Only tiles that are long enough to be cut ask for columns that hold a part of them."""
    options = Options(tile_q=128, tile_q_second=16, cta_slots=264)
    plan = make_plan(options, Requests((1, 158), (2931, 158), causal=True))
    loads = [load for load in kv_tiles(plan) if load > 3]
    assert len(loads) >= 5 and max(loads) <= 10


# One CTA on each multiprocessor.
HOPPER = Options(tile_q=128, tile_kv=128, cta_slots=132, piece_tiles=2)
LONG_PROMPTS = {
    "1 x 16384": [16384],
    "8 x 2048": [2048] * 8,
    "32 x 512": [512] * 32,
    "1 x 2048": [2048],
    "mixed": [MIXED.randint(600, 9000) for _ in range(12)],
}


def makespan(
    plan: Plan, num_kv_heads: int, ctas: int, tile_kv: int = HOPPER.tile_kv, piece_tiles: int = 1
) -> tuple[int, float]:
    """When the last of some CTAs ends that take columns in order, and the ideal, in KV tiles.

    Heads of a column follow each other; each item counts as `piece_tiles` more.
    """
    loads = kv_tiles(plan, tile_kv)
    items = [piece_tiles * len(column) for column in plan.columns]
    costs = [load + more for load, more in zip(loads, items, strict=True)]
    free = [0] * ctas
    for cost in (cost for cost in costs for _ in range(num_kv_heads)):
        heapq.heapreplace(free, free[0] + cost)
    return max(free), num_kv_heads * sum(costs) / ctas


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
@pytest.mark.parametrize("name", LONG_PROMPTS)
def test_prompts_fill_a_gpu_of_one_cta_per_multiprocessor(name, num_kv_heads, causal):
    """Whole tiles wherever these are balanced, and equal shares where they are not."""
    lengths = tuple(LONG_PROMPTS[name])
    options = dataclasses.replace(HOPPER, num_kv_heads=num_kv_heads)
    plan = make_plan(options, Requests(lengths, lengths, page_size=0, causal=causal))
    last, ideal = makespan(plan, num_kv_heads, options.cta_slots)
    assert last <= 1.05 * ideal + 4
    if plan.info["num_merges"] == 0 and len(plan.columns) == len(plan.items):
        loads = kv_tiles(plan, options.tile_kv)
        assert loads == sorted(loads, reverse=True)


def test_where_heads_take_turns_long_tiles_are_dealt_to_columns():
    """512 new tokens after 8192 among requests that decode: one head's long tiles must not wait
    for the others' short ones; without long tiles the hardware deals.
    """
    sizes = {"num_kv_heads": 8, "group_size": 2, "head_dim_vo": 256}
    options = Options(**sizes, tile_q=64, cta_slots=132)
    mixed = make_plan(options, Requests((512,) + (1,) * 31, (8192,) + (1024,) * 31, causal=True))
    assert mixed.info["num_merges"] == 0 and len(mixed.columns) == 16 < len(mixed.items)
    last, ideal = makespan(mixed, 8, 132, TILE_KV)
    assert last <= 1.05 * ideal + 4
    even = make_plan(options, Requests((512,) * 32, (512,) * 32, causal=True))
    assert len(even.columns) == len(even.items)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 7, 8, 16, 32, 48])
@pytest.mark.parametrize("kv_len", [1024, 4096, 12288, 16384, 24576, 65536])
def test_few_rows_against_many_keys_take_the_whole_gpu_once(num_kv_heads, kv_len):
    """Heads that do not divide the multiprocessors leave some idle rather than begin another wave
    of lists: with 8 heads 16384 keys took half as long again as 12288.
    """
    options = dataclasses.replace(HOPPER, num_kv_heads=num_kv_heads)
    plan = make_plan(options, Requests((16,), (kv_len,), page_size=0, causal=True))
    last, _ = makespan(plan, num_kv_heads, options.cta_slots, piece_tiles=2)
    tiles = kv_len // options.tile_kv
    columns = options.cta_slots // num_kv_heads
    assert last <= -(-tiles // columns) + options.piece_tiles + 2


def test_parts_that_cost_more_than_they_save_are_not_made():
    """Of 512 tokens, whose tiles would each write 64 KiB of partial results to save 2 KV tiles."""
    for tokens, keys in ((512, 512), (256, 1024), (512, 1024)):
        plan = make_plan(HOPPER, Requests((tokens,), (keys,), page_size=0, causal=True))
        assert plan.info["num_merges"] == 0


def test_a_grid_has_at_most_32767_columns():
    """What does not fit stands in the lists of the first columns."""
    options = Options(num_kv_heads=1, group_size=1, disable_split_kv=True)
    plan = make_plan(options, Requests(1, (64,) * 70_000, page_size=64))
    assert plan.info["num_ctas"] == 32767
    assert sum(map(len, plan.columns)) == 70_000 and max(map(len, plan.columns)) == 3
