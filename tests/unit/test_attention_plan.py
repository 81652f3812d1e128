"""Properties of attention plans, from the compiled planner."""

from __future__ import annotations

import dataclasses
import gc
import heapq
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashinfer._attention.plan.planner import AttentionPlanner
from tests.attention_plans import (
    TILE_KV,
    Options,
    Plan,
    Requests,
    check_covers,
    check_slots,
    int32,
    launches,
    make_plan,
    plan_with,
    requests,
)

pytestmark = pytest.mark.compiler

FUZZ = settings(
    max_examples=300,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


# ---- every plan ----


@FUZZ
@given(launches())
def test_every_row_and_key_is_covered_once(launch):
    options, groups = launch
    plan = make_plan(options, *groups)
    check_covers(options, plan, *groups)
    check_slots(options, plan)
    assert plan.info["groups"][0]["qo_tokens"] == sum(groups[0].qo_lens())
    assert plan.info["groups"][0]["batch_size"] == len(groups[0].kv_len)
    assert plan.info["groups"][0]["kv_entries"] == groups[0].group().kv_indptr[-1]


@FUZZ
@given(launches())
def test_the_same_batch_gives_the_same_plan(launch):
    options, groups = launch
    check_same(make_plan(options, *groups), make_plan(options, *groups))


def check_same(plan: Plan, again: Plan) -> None:
    assert again.info == plan.info and again.columns == plan.columns
    for column in plan.columns:
        assert np.array_equal(again.items[column], plan.items[column])
    assert np.array_equal(again.merges, plan.merges)


@settings(FUZZ, max_examples=100)
@given(st.lists(launches(), min_size=2, max_size=4))
def test_what_a_planner_planned_before_does_not_matter(batches):
    """Its memory is kept from plan to plan, and nothing of what is in it."""
    planner = AttentionPlanner()
    for options, groups in batches:
        plan = make_plan(options, *groups)
        check_same(plan, make_plan(options, *groups, planner=planner))


@FUZZ
@given(launches())
def test_cuts_are_where_they_were_asked_for(launch):
    options, groups = launch
    plan = make_plan(options, *groups)
    pieces = plan.pieces()
    if options.disable_split_kv:
        assert (pieces["partial_slot"] < 0).all() and plan.info["float_bytes"] == 0
    elif options.fixed_split_size:
        size = -(-options.fixed_split_size // options.tile_kv) * options.tile_kv
        assert (pieces["kv_begin"] // size == np.maximum(pieces["kv_end"] - 1, 0) // size).all()
        last = {int(merge["slot_end"]) - 1 for merge in plan.merges}
        inner = [
            piece
            for piece in pieces
            if piece["partial_slot"] >= 0 and piece["partial_slot"] not in last
        ]
        assert all(piece["kv_end"] % size == 0 for piece in inner)


@settings(FUZZ, max_examples=100)
@given(requests(max_batch=6), requests(max_batch=6), st.sampled_from([64, 192, 1000]), st.data())
def test_fixed_split_size_cuts_a_request_the_same_in_every_batch(one, other, size, data):
    """The ranges, which parts are merged and how do not depend on the rest of the batch."""
    options = Options(tile_q=64, fixed_split_size=size)
    other = dataclasses.replace(
        other, page_size=one.page_size, causal=one.causal, window_left=one.window_left
    )
    lens = [*zip(one.qo_lens(), one.kv_len, strict=True)]
    rest = [*zip(other.qo_lens(), other.kv_len, strict=True)]
    at = data.draw(st.integers(0, len(rest)))
    mixed = [*rest[:at], *lens, *rest[at:]]
    alone = dataclasses.replace(one, qo_len=tuple(one.qo_lens()))
    batch = dataclasses.replace(
        alone, qo_len=tuple(q for q, _ in mixed), kv_len=tuple(k for _, k in mixed)
    )

    def ranges(plan: Plan, first: int) -> list[tuple[int, ...]]:
        return [
            (piece["request"] - first, piece["row_begin"], piece["kv_begin"], piece["kv_end"])
            for piece in plan.pieces()
            if first <= piece["request"] < first + len(lens)
        ]

    plans = make_plan(options, alone), make_plan(options, batch)
    assert ranges(plans[0], 0) == ranges(plans[1], at)
    assert plans[0].info["merged_rows"] == plans[1].info["merged_rows"]


# ---- balance ----


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
    """Prefill with too few tiles for the GPU: 512 new tokens behind 32768."""
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
    """512 new tokens behind 8192 among requests that decode: one head's long tiles must not wait
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


# ---- CUDA graphs ----

FIXED = ("num_ctas", "num_merges", "rows_per_slot", "items_offset", "merges_offset", "num_slots")


@FUZZ
@given(
    st.data(),
    st.sampled_from([(16, 64), (64, 64), (128, 64), (128, 128), (192, 128)]),
    st.sampled_from([0, 0, 64, 1024]),
    st.booleans(),
)
def test_a_graph_replays_for_every_batch_within_its_capacity(data, tiles, split, disable):
    """What the captured launches were made from never changes, and the first workspaces suffice."""
    options = Options(
        tile_q=tiles[0],
        tile_kv=tiles[1],
        fixed_split_size=split,
        disable_split_kv=disable,
        graph_batch_size=12,
        graph_qo_tokens=5000,
    )
    most = Requests((400,) * 12, (9000,) * 12)
    float_bytes, int_bytes = (
        make_plan(options, most).info[position] for position in ("float_bytes", "int_bytes")
    )
    captured = make_plan(options, most, float_bytes=float_bytes)
    for _ in range(3):
        group = data.draw(requests())
        plan = make_plan(options, group, float_bytes=float_bytes)
        for position in (*FIXED, "sums_offset", "merged_rows"):
            assert plan.info[position] == captured.info[position]
        assert plan.info["int_bytes"] <= int_bytes
        check_covers(options, plan, group)
        check_slots(options, plan)


def test_growing_past_a_graphs_capacity_is_refused():
    options = Options(graph_batch_size=3, graph_qo_tokens=6)
    make_plan(options, Requests(2, (100,) * 3))
    with pytest.raises(ValueError, match="batch has 4 requests.*planned for 3"):
        make_plan(options, Requests(1, (100,) * 4))
    with pytest.raises(ValueError, match="batch has 7 query tokens.*planned for 6"):
        make_plan(options, Requests((3, 4), (100,) * 2))
    options = dataclasses.replace(options, graph_qo_len=2)
    assert make_plan(options, Requests(2, (100,) * 3)).info["rows_per_slot"] == 8
    with pytest.raises(ValueError, match="3 query tokens in one request.*planned for 2"):
        make_plan(options, Requests((3, 1), (100,) * 2))


def test_an_empty_graph_batch_has_idle_columns():
    plan = make_plan(Options(graph_batch_size=4, graph_qo_tokens=4), Requests(1, ()))
    assert plan.info["num_ctas"] == 49 and (plan.items["request"][:49] == -1).all()
    assert not plan.merges["num_rows"].any()


# ---- workspaces and objects ----


def test_too_small_workspaces_are_refused_before_anything_is_written():
    planner = AttentionPlanner()
    planner.configure(Options().config())
    group = Requests(1, (8192,) * 16).group()
    float_bytes, int_bytes = planner.bytes_needed(group)
    workspace = torch.zeros(int_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"float.* needs {float_bytes} .* has {float_bytes - 1}"):
        planner.plan(workspace, float_bytes - 1, group)
    with pytest.raises(ValueError, match=f"int.* needs {int_bytes} bytes, it has {int_bytes - 16}"):
        planner.plan(workspace[16:], float_bytes, group)
    assert not workspace.any()
    planner.plan(workspace, float_bytes, group)
    assert workspace.any()


def test_plans_do_not_share_state():
    """Two objects used in turn give what each gives alone, and go away without the other."""
    groups = Requests(1, (8192,) * 16).group(), Requests(2, (100, 5000)).group()
    planners = [AttentionPlanner(), AttentionPlanner()]
    for planner, tile_q in zip(planners, (16, 64), strict=True):
        planner.configure(Options(tile_q=tile_q).config())
    first = [plan_with(planner, None, -1, g) for planner, g in zip(planners, groups, strict=True)]
    for _ in range(3):
        again = [
            plan_with(planner, None, -1, g) for planner, g in zip(planners, groups, strict=True)
        ]
        assert again == first
    del planners[0]
    gc.collect()
    assert plan_with(planners[0], None, -1, groups[1]) == first[1]


# ---- lengths ----


def test_lengths_come_from_pages_or_from_kv_len():
    group = Requests(1, (100, 0, 5000, 16))
    lengths = int32([100, 0, 5000, 16])
    planner = AttentionPlanner()
    planner.configure(Options().config())
    infos = [
        plan_with(planner, None, -1, group.group(**changes))
        for changes in ({}, {"kv_len": lengths}, {"kv_len": lengths, "last_page_len": None})
    ]
    assert infos[0] == infos[1] == infos[2]


def test_padding_requests_without_pages_are_empty():
    """Engines pad a batch with repeated indptr and any last_page_len."""
    planner = AttentionPlanner()
    planner.configure(Options().config())
    workspace = torch.zeros(1 << 16, dtype=torch.uint8)
    group = Requests(1, (100, 0, 0)).group(last_page_len=int32([4, 1, 16]))
    info = plan_with(planner, workspace, -1, group)
    plan = make_plan(Options(), Requests(1, (100, 0, 0)))
    written = workspace[info["items_offset"] :][: plan.items.nbytes].numpy()
    assert np.array_equal(written.view(plan.items.dtype), plan.items)


LONG = 2**31 - 1


def test_lengths_near_2_to_31_do_not_overflow():
    plan = make_plan(Options(cta_slots=132, num_kv_heads=1), Requests(1, (LONG,), page_size=1024))
    check_slots(Options(num_kv_heads=1), plan)
    pieces = plan.pieces()
    assert pieces["kv_end"].max() == LONG and (pieces["kv_begin"] >= 0).all()
    assert sum((pieces["kv_end"].astype(np.int64)) - pieces["kv_begin"]) == LONG
    window = make_plan(Options(), Requests(1, (LONG,), page_size=0, causal=True, window_left=99))
    assert [*window.pieces()[["kv_begin", "kv_end"]].tolist()] == [(LONG - 127, LONG)]


REFUSED = {
    "paged_kv_indptr": [
        (int32([0, 5, 3]), r"\[2\] must be at least 5, got 3"),
        (int32([-1, 5, 8]), r"\[0\] must be at least 0, got -1"),
        (torch.tensor([0, 5, 8]), "dtype int32, got int64"),
        (int32([[0, 5, 8]]), "1 dimension"),
        (int32([]), "at least one element"),
        (int32([0, 9, 5, 9, 8, 9])[::2], "contiguous"),
        (int32([0, LONG, LONG]), "fewer than 2^31"),
        (None, "must be a torch.Tensor, got None"),
    ],
    "qo_indptr": [
        (int32([0, 1]), r"shape \[3\], got \[2\]"),
        (int32([0, 3, 1]), r"\[2\] must be at least 3, got 1"),
        (int32([-5, 3, 4]), r"\[0\] must be at least 0, got -5"),
        (int32([2, 3, 5]), "must begin with 0, got 2"),
        (int32([0, LONG, LONG]), "too (many|long)"),
    ],
    "paged_kv_last_page_len": [
        (int32([1, 17]), r"\[1\] must be from 1 to the page size 16.*got 17"),
        (int32([0, 16]), r"\[0\] must be from 1 .* got 0"),
        (int32([16]), r"shape \[2\], got \[1\]"),
        (torch.ones(2, dtype=torch.float32), "dtype int32, got float32"),
        (None, "must say how long"),
    ],
    "seq_lens": [
        (int32([80, 47]), r"\[1\] is 47, but by .* the request has 48 tokens"),
        (int32([80]), r"shape \[2\]"),
    ],
}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("name", "value", "message"), CASES)
def test_bad_indices_are_refused_by_name(name, value, message):
    planner = AttentionPlanner()
    planner.configure(Options().config())
    fields = {"paged_kv_indptr": "kv_indptr", "seq_lens": "kv_len", "qo_indptr": "qo_indptr"}
    group = Requests((1, 2), (80, 48)).group(**{fields.get(name, "last_page_len"): value})
    workspace = torch.zeros(1 << 16, dtype=torch.uint8)
    with pytest.raises((ValueError, TypeError), match=f"`{name}`.*{message.replace('^', '.')}"):
        planner.plan(workspace, -1, group)
    assert not workspace.any()
