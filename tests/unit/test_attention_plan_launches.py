"""Work lists as wrappers make them, of one launch or two, and how they are balanced and ordered."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashinfer
from flashinfer import reference_backend
from flashinfer._attention.plan import choice as backends
from flashinfer._attention.plan.executor import AttentionExecutor
from flashinfer._attention.plan.planner import ANY_ROWS
from tests.attention_plans import (
    Options,
    Plan,
    Requests,
    check_covers,
    check_slots,
    indptr,
    int32,
    item_costs,
    launches,
    layout_of,
    make_plan,
    read_plan,
)
from tests.attention_shares import Shares, Totals, best_shares, gpu_columns

pytestmark = pytest.mark.compiler

FUZZ = settings(
    max_examples=150,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
PAGE_SIZE = 16


# ---- Launches of wrappers ----


@contextlib.contextmanager
def hopper() -> Iterator[None]:
    """Plans without a GPU, which are chosen as on Hopper."""
    with mock.patch.object(backends, "is_hopper", lambda device: True), reference_backend():
        yield


def launch_of(executor: AttentionExecutor) -> tuple[Options, Plan]:
    """What the planner was told, and the work list in the executor's workspace."""
    planner = executor._planner
    assert planner is not None and planner.config is not None
    options = Options(**planner.config._asdict())
    info = layout_of(planner)
    assert info["int_bytes"] <= executor.workspaces.ints.nbytes
    assert info["float_bytes"] <= executor.workspaces.floats.nbytes
    return options, read_plan(info, executor.workspaces.ints[: info["int_bytes"]])


def check_launch(executor: AttentionExecutor, *groups: Requests) -> Options:
    options, plan = launch_of(executor)
    check_covers(options, plan, *groups)
    check_slots(options, plan)
    return options


PART = st.tuples(st.integers(0, 40), st.integers(1, 400), st.integers(0, 9000))
DECODING = st.tuples(st.integers(0, 40), st.integers(0, 4), st.integers(0, 20000))


@FUZZ
@given(
    st.lists(PART, min_size=1, max_size=3),
    DECODING,
    st.booleans(),
    st.sampled_from([(8, 4, 128), (8, 2, 256), (4, 7, 64), (1, 16, 128), (2, 20, 128)]),
    st.sampled_from(["auto", "fa2", "fa3"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_launches_of_a_mixed_batch_share_it(
    parts, decoding, causal, heads, backend, is_apart, random
):
    """Whatever is chosen, each row and key is in one item of one of the launches."""
    lengths = [(q, kv) for count, q, kv in (decoding, *parts) for _ in range(count)]
    random.shuffle(lengths)
    batch = Requests(
        tuple(q for q, _ in lengths), tuple(kv for _, kv in lengths), PAGE_SIZE, causal
    )
    num_kv_heads, group_size, head_dim = heads
    wrapper = flashinfer.BatchAttention(device="cpu", backend=backend)
    executor = wrapper._executor
    wanted = "flashinfer._attention.plan.mixed._is_faster_apart"
    with hopper(), mock.patch(wanted, return_value=is_apart and backend == "auto"):
        pages = [-(-n // PAGE_SIZE) for n in batch.kv_len]
        wrapper.plan(
            *(indptr(batch.qo_lens()), indptr(pages), torch.zeros(sum(pages)).int()),
            *(int32(list(batch.kv_len)), num_kv_heads * group_size, num_kv_heads),
            *(head_dim, head_dim, PAGE_SIZE, causal),
        )
    options = check_launch(executor, batch)
    rows = [n * group_size for n in batch.qo_lens()]
    few = [n for n in rows if 0 < n <= 16]
    is_mixed = bool(few) and max(rows) > 16
    if backend != "auto":
        assert executor.config.backend == backend and not executor._is_apart
    assert executor._is_apart == (is_apart and is_mixed and backend == "auto")
    if executor._is_apart:
        second = check_launch(executor._decoder, batch)
        assert (second.least_rows, second.most_rows + 1) == (0, options.least_rows)
        assert second.most_rows == max(few) and options.most_rows == ANY_ROWS
        assert options.tile_q_second == second.tile_q_second == 0
    else:
        assert (options.least_rows, options.most_rows) == (0, ANY_ROWS)
        assert bool(options.tile_q_second) == (is_mixed and executor.config.backend == "fa2")


@FUZZ
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20000)), min_size=1, max_size=40),
    st.sampled_from([(8, 4), (1, 16), (2, 7)]),
    st.booleans(),
)
def test_a_launch_of_two_sets_of_tensors_computes_both(prefill, decode, heads, causal):
    """``BatchPODWithPagedKVCacheWrapper``: kind 0 is the first set, kind 1 the second."""
    groups = [
        Requests(tuple(q for q, _ in part), tuple(kv for _, kv in part), PAGE_SIZE)
        for part in (prefill, decode)
    ]
    num_kv_heads, group_size = heads
    workspace = torch.empty(64 << 20, dtype=torch.uint8)
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace)
    wrapper._causal = causal  # as after such a run, for which the next plan is made
    tables = []
    for group in groups:
        pages = [-(-n // PAGE_SIZE) for n in group.kv_len]
        last = [(n - 1) % PAGE_SIZE + 1 for n in group.kv_len]
        tables += [indptr(group.qo_lens()), indptr(pages)]
        tables += [torch.zeros(sum(pages)).int(), int32(last)]
    with hopper():
        wrapper.plan(*tables, num_kv_heads * group_size, num_kv_heads, 128, PAGE_SIZE)
    groups[0] = dataclasses.replace(groups[0], causal=causal)
    options = check_launch(wrapper._executor, *groups)
    longest = max(q for q, _ in decode) * group_size
    assert options.tile_q_second == (16 if longest <= 16 else 64)


# ---- Any launch ----


def end_of_columns(loads: list[int], columns: int) -> int:
    """When the last of some CTAs ends that take lists in order as they become free."""
    free = [0] * columns
    for load in loads:
        heapq.heapreplace(free, free[0] + load)
    return max(free)


def shares_of(options: Options, plan: Plan) -> Shares:
    """The tiles that a plan has cut, or has not."""
    tiles: dict[tuple[int, int, int], list[int]] = {}
    for index in (i for column in plan.columns for i in column):
        item = plan.items[index]
        tile = tiles.setdefault((item["kind"], item["request"], item["row_begin"]), [0, 0])
        tile_q = options.tile_q_second if item["kind"] else options.tile_q
        tile[0] = min(int(item["qo_len"]) * options.group_size - int(item["row_begin"]), tile_q)
        tile[1] += -(-int(item["kv_end"] - item["kv_begin"]) // options.tile_kv)
    units = [32 if q >= 128 else 16 for q in (options.tile_q, options.tile_q_second)]
    totals = Totals(units, options.piece_tiles)
    rows = {(kind, request): 0 for kind, request, _ in tiles}
    for (kind, request, _), (its, _) in tiles.items():
        rows[kind, request] = max(rows[kind, request], its)
    for (kind, request, _), (_, kv_tiles) in tiles.items():
        totals.add(int(kind), rows[kind, request], kv_tiles)
    launch = (options.num_kv_heads, options.head_dim_vo, options.cta_slots)
    tiles = options.tile_q, options.tile_kv, options.tile_q_second > 0
    return best_shares(totals, *launch, *tiles)


@settings(FUZZ, max_examples=400)
@given(launches())
def test_no_part_of_a_tile_is_too_short_to_be_worth_it(launch):
    options, groups = launch
    if options.fixed_split_size:
        return
    plan = make_plan(options, *groups)
    least = shares_of(options, plan).min_piece
    for piece in plan.pieces():
        if piece["partial_slot"] >= 0:
            tiles = -(-(piece["kv_end"] - piece["kv_begin"]) // options.tile_kv)
            assert tiles >= least


@settings(FUZZ, max_examples=400)
@given(launches())
def test_the_end_of_a_plan_is_bounded(launch):
    """The last CTA ends within 4 % and two of the shortest parts of what equal shares take with
    their merge, whether tiles are cut or not. Both shapes of tiles count.
    """
    options, groups = launch
    options = dataclasses.replace(options, fixed_split_size=0, disable_split_kv=False, lone_speed=1)
    plan = make_plan(options, *groups)
    loads = [sum(column) for column in item_costs(options, plan)]
    heads, slots = options.num_kv_heads, options.cta_slots
    if plan.info["num_merges"] or options.graph_batch_size >= 0:
        assert len(plan.columns) <= gpu_columns(slots, heads)
    shares = shares_of(options, plan)
    short = 2 * (shares.min_piece + options.piece_tiles) * max(shares.totals.unit)
    last = end_of_columns([load for load in loads for _ in range(heads)], slots)
    assert last <= 1.04 * shares.end + shares.waves * short


@settings(FUZZ, max_examples=400)
@given(launches())
def test_what_takes_longest_comes_first(launch):
    """Whole tiles and parts of a fixed size, to 1/1024 of their range; equal ones in order."""
    options, groups = launch
    if not options.fixed_split_size:
        options = dataclasses.replace(options, disable_split_kv=True)
    plan = make_plan(options, *groups)
    costs = item_costs(options, plan)
    flat = [cost for column in costs for cost in column]
    if not flat:
        return
    step = 0
    while (max(flat) - min(flat)) >> step >= 1024:
        step += 1
    names = ["kind", "request", "row_begin", "kv_begin"] if len(groups) > 1 else ["request"]
    names += ["row_begin", "kv_begin"]
    lists = list(zip(plan.columns, costs, strict=True))
    if options.graph_batch_size < 0 and all(len(column) == 1 for column in plan.columns):
        lists = [([i for c in plan.columns for i in c], flat)]
    for column, column_costs in lists:
        keys = [
            ((max(flat) - cost) >> step, *(int(plan.items[name][i]) for name in names))
            for i, cost in zip(column, column_costs, strict=True)
        ]
        assert keys == sorted(keys)
