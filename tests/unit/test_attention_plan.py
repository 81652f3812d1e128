"""Properties of attention plans, from the compiled planner."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer._attention.plan.planner import AttentionPlanner
from tests.attention_plans import (
    FUZZ,
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
    visible,
)

pytestmark = pytest.mark.compiler

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
def test_keys_that_a_mask_hides_are_left_out(launch):
    """A mask of the keys that causality and window show has a plan that covers just these."""
    options, (group, *_) = launch
    ranges = [
        visible(group, qo_len, kv_len, token)
        for qo_len, kv_len in zip(group.qo_lens(), group.kv_len, strict=True)
        for token in range(qo_len)
    ]
    shown = int32(ranges).reshape(-1, 2)
    everything = dataclasses.replace(group, causal=False, window_left=-1)
    planner = AttentionPlanner()
    plan = make_plan(options, everything, planner=planner, visible=shown)
    check_covers(options, plan, group)
    check_slots(options, plan)
    # The next plan is of any key again.
    check_covers(options, make_plan(options, everything, planner=planner), everything)


def test_ranges_of_another_batch_are_refused():
    planner, options = AttentionPlanner(), Options()
    with pytest.raises(ValueError, match="`visible` must have 5 rows.*got 4"):
        make_plan(options, Requests(5, (100,)), planner=planner, visible=int32([[0, 9]] * 4))
    check_covers(
        options, make_plan(options, Requests(5, (100,)), planner=planner), Requests(5, (100,))
    )


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


# ---- CUDA graphs ----

FIXED = (
    *("num_ctas", "num_merges", "rows_per_slot", "num_slots"),
    *("items_offset", "merges_offset", "counters_offset"),
)


@FUZZ
@given(
    st.data(),
    st.sampled_from([(16, 64), (64, 64), (128, 64), (128, 128), (192, 128)]),
    st.sampled_from([0, 0, 64, 1024]),
    st.booleans(),
)
def test_a_graph_replays_for_every_batch_within_its_capacity(data, tiles, split, disable):
    """The inputs of captured launches never change, and the first workspaces suffice."""
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


@pytest.mark.parametrize(
    ("changes", "merges"),
    [
        ({}, True),
        ({"kv_len": (9000,) * 2}, False),  # many parts each
        ({"tile_q": 64}, False),
        ({"tile_q_second": 64}, False),
        ({"fixed_split_size": 1024}, False),
        ({"head_dim_vo": 512}, False),
        ({"disable_split_kv": True}, False),
        ({"graph_batch_size": 64, "graph_qo_tokens": 64, "graph_qo_len": 1}, True),
        ({"graph_batch_size": 4, "graph_qo_tokens": 40, "graph_qo_len": 1}, False),
    ],
)
def test_the_kernel_merges_few_parts_alone(changes, merges):
    lengths = changes.pop("kv_len", tuple(range(2000, 4000, 50))[: changes.get("graph_batch_size")])
    options = Options(cta_slots=264, **changes)
    plan = make_plan(options, Requests(1, lengths))
    assert (plan.info["counters_offset"] >= 0) == merges
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
