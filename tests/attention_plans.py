"""Batches for the attention planner, and what must hold of every plan. Plans go to CPU memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from flashinfer._attention.plan.planner import ANY_ROWS, AttentionPlanner, PlanConfig
from flashinfer._attention.plan.requests import ArgumentNames
from flashinfer._attention.plan.requests import Requests as PlannerRequests
from tests.native_structs import struct_dtype

FUZZ = settings(
    max_examples=300,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)

ITEM = struct_dtype("scheduler/work.h", "WorkItem")
MERGE = struct_dtype("scheduler/work.h", "MergeItem")
LAYOUT = struct_dtype("scheduler/plan_layout.h", "PlanLayout")
TILE_KV = 64
POISON = 0x7B


@dataclass(frozen=True)
class Requests:
    """A group of requests by lengths; page_size 0 is ragged."""

    qo_len: tuple[int, ...] | int  # one number: that many tokens in each request
    kv_len: tuple[int, ...]
    page_size: int = 16
    causal: bool = False
    window_left: int = -1
    first_entry: int = 0  # of kv_indptr

    def qo_lens(self) -> list[int]:
        if isinstance(self.qo_len, int):
            return [self.qo_len] * len(self.kv_len)
        return list(self.qo_len)

    def group(self, **changes: Any) -> PlannerRequests:
        even = isinstance(self.qo_len, int)
        size = self.page_size
        entries = [-(-n // size) if size else n for n in self.kv_len]
        last = [n - (e - 1) * size if e else 0 for n, e in zip(self.kv_len, entries, strict=True)]
        values = {
            "argument_names": ArgumentNames.PREFILL,
            "qo_indptr": None if even else indptr(self.qo_lens()),
            "kv_indptr": indptr(entries) + self.first_entry,
            "kv_len": None,
            "last_page_len": int32(last) if size else None,
            "page_size": size,
            "tokens_per_request": self.qo_len if even else 0,
            "causal": self.causal,
            "window_left": self.window_left,
        }
        assert changes.keys() <= values.keys()
        return PlannerRequests(**{**values, **changes})


@dataclass(frozen=True)
class Options:
    num_kv_heads: int = 8
    group_size: int = 4
    head_dim_vo: int = 128
    tile_q: int = 16
    cta_slots: int = 396
    tile_q_second: int = 0
    tile_kv: int = TILE_KV
    fixed_split_size: int = 0
    disable_split_kv: bool = False
    graph_batch_size: int = -1
    graph_qo_tokens: int = 0
    graph_qo_len: int = 0
    lone_speed: int = 1
    piece_tiles: int = 1
    least_rows: int = 0
    most_rows: int = ANY_ROWS

    def config(self) -> PlanConfig:
        return PlanConfig(**dataclasses.asdict(self))


@dataclass
class Plan:
    info: dict[str, Any]  # the layout
    items: np.ndarray
    merges: np.ndarray
    counters: np.ndarray  # empty: the kernel does not merge
    columns: list[list[int]] = field(default_factory=list)  # items of each CTA column

    def pieces(self) -> np.ndarray:
        """The items that do something, by slot and position: without the distribution."""
        items = self.items[[i for column in self.columns for i in column]]
        return np.sort(items[[name for name in ITEM.names if name != "next"]])


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def indptr(lengths: list[int]) -> torch.Tensor:
    return int32(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist())


def layout_of(planner: AttentionPlanner) -> dict[str, Any]:
    """The latest plan's layout by the names of its fields."""
    record = planner.layout.numpy().view(LAYOUT)[0]
    found = {name: record[name] for name in LAYOUT.names}
    groups = [{name: int(g[name]) for name in g.dtype.names} for g in found.pop("groups")]
    return {**{name: int(value) for name, value in found.items()}, "groups": groups}


def plan_with(planner: AttentionPlanner, *arguments: Any) -> dict[str, Any]:
    """Plans, and returns the layout."""
    planner.plan(*arguments)
    return layout_of(planner)


def make_plan(
    options: Options,
    *groups: Requests,
    float_bytes: int = -1,
    planner: AttentionPlanner | None = None,
    visible: torch.Tensor | None = None,
) -> Plan:
    """Plans into a buffer of exactly the size that is asked for, filled with poison."""
    planner = planner or AttentionPlanner()
    planner.configure(options.config())
    arguments = [*(group.group() for group in groups), *[None] * (2 - len(groups)), visible]
    planned_bytes = plan_with(planner, None, float_bytes, *arguments)["int_bytes"]
    workspace = torch.full((planned_bytes + 64,), POISON, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 16 :][: planned_bytes + 16]
    info = plan_with(planner, workspace[:planned_bytes], float_bytes, *arguments)
    assert (workspace[planned_bytes:] == POISON).all(), "written behind the workspace"
    return read_plan(info, workspace[:planned_bytes])


def read_plan(info: dict[str, Any], workspace: torch.Tensor) -> Plan:
    """The plan in an int workspace, with the lists of every CTA column followed to their ends."""
    raw = workspace[: workspace.numel() // 16 * 16].numpy()
    behind = info["items_offset"]
    size = (len(raw) - behind) // ITEM.itemsize * ITEM.itemsize
    items = raw[behind : behind + size].view(ITEM)
    merges = raw[info["merges_offset"] :][: info["num_merges"] * MERGE.itemsize].view(MERGE)
    first = info["counters_offset"]
    counters = raw[first:behind] if first >= 0 else raw[:0]
    plan = Plan(info, items, merges, counters[: len(counters) // 4 * 4].view(np.uint32))
    seen: set[int] = set()
    for cta in range(info["num_ctas"]):
        column, index = [], cta
        if items["request"][cta] < 0:
            assert items["next"][cta] == -1, "nothing follows where there is nothing to do"
            index = -1
        while index >= 0:
            assert index not in seen, "an item stands in two places, or a list has a cycle"
            seen.add(index)
            column.append(index)
            index = int(items["next"][index])
        plan.columns.append(column)
    return plan


def item_costs(options: Options, plan: Plan) -> list[list[int]]:
    """Cost of the items of each column, in the planner's unit (TileCost in attention_tiles.h)."""
    tiles = -(-(plan.items["kv_end"] - plan.items["kv_begin"]) // options.tile_kv)
    per_tile = [32 if q >= 128 else 16 for q in (options.tile_q, options.tile_q_second)]
    return [
        [(int(tiles[i]) + options.piece_tiles) * per_tile[plan.items["kind"][i]] for i in column]
        for column in plan.columns
    ]


def visible(request: Requests, qo_len: int, kv_len: int, token: int) -> tuple[int, int]:
    """Keys that a query token sees, by the definition of the masks."""
    position = token + kv_len - qo_len
    begin = 0 if request.window_left < 0 else max(0, position - request.window_left)
    end = min(kv_len, position + 1) if request.causal else kv_len
    return (begin, end) if begin < end else (0, 0)


def check_covers(options: Options, plan: Plan, *groups: Requests) -> None:
    """Every (row, visible key) is in exactly one item, and nothing is done in vain."""
    rows_of: dict[tuple[int, int, int], list[np.void]] = {}
    for index in (i for column in plan.columns for i in column):
        item = plan.items[index]
        group = groups[item["kind"] if len(groups) > 1 else 0]
        r = int(item["request"])
        qo_lens = group.qo_lens()
        assert item["qo_begin"] == sum(qo_lens[:r]) and item["qo_len"] == qo_lens[r]
        assert item["kv_len"] == group.kv_len[r]
        assert item["kv_base"] == group.group()[2][r]
        assert item["row_begin"] < qo_lens[r] * options.group_size
        rows_of.setdefault((int(item["kind"]), r, int(item["row_begin"])), []).append(item)

    expected = set()
    for number, group in enumerate(groups):
        for r, (qo_len, kv_len) in enumerate(zip(group.qo_lens(), group.kv_len, strict=True)):
            rows = qo_len * options.group_size
            if not options.least_rows <= rows <= options.most_rows:
                continue  # of another launch
            small = len(groups) == 1 and 0 < rows <= options.tile_q_second
            kind = int(number == 1 or small)
            tile_q = options.tile_q_second if kind else options.tile_q
            for row in range(0, rows, tile_q):
                expected.add((kind, r, row))
                tokens = {x // options.group_size for x in range(row, min(row + tile_q, rows))}
                seen = [visible(group, qo_len, kv_len, token) for token in tokens]
                seen = [(a, b) for a, b in seen if a < b] or [(0, 0)]
                low, high = min(a for a, _ in seen), max(b for _, b in seen)
                check_ranges(rows_of[kind, r, row], low, high, options.tile_kv)
    assert rows_of.keys() == expected


def check_ranges(items: list[np.void], low: int, high: int, tile_kv: int = TILE_KV) -> None:
    """The items of a tile join end to end, cut at KV tiles, and hold the visible keys [low, high).

    A tile whose last rows see nothing may end a little later than its rows can see.
    """
    items = sorted(items, key=lambda item: (item["kv_begin"], item["kv_end"]))
    for a, b in zip(items, items[1:], strict=False):
        assert a["kv_end"] == b["kv_begin"] and a["kv_end"] % tile_kv == 0
        assert b["partial_slot"] == a["partial_slot"] + 1, "slots follow each other in order of KV"
    begin, end = int(items[0]["kv_begin"]), int(items[-1]["kv_end"])
    assert begin % tile_kv == 0
    assert begin == low - low % tile_kv and end == high if high else begin == end == 0
    assert len(items) == 1 or all(item["kv_begin"] < item["kv_end"] for item in items)
    assert (items[0]["partial_slot"] >= 0) == (len(items) > 1)


def check_slots(options: Options, plan: Plan) -> None:
    """Every slot is written by one item and read by one merge, which is for that tile."""
    items = plan.items[[i for column in plan.columns for i in column]]
    parts = items[items["partial_slot"] >= 0]
    info = plan.info
    assert (
        sorted(parts["partial_slot"]) == list(range(len(parts))) and len(parts) <= info["num_slots"]
    )
    by_slot = {int(part["partial_slot"]): part for part in parts}
    used = plan.merges[plan.merges["num_rows"] > 0]
    assert not np.any(plan.merges[len(used) :]["num_rows"])
    slots = [s for merge in used for s in range(merge["slot_begin"], merge["slot_end"])]
    assert slots == list(range(len(parts))), "merges stand in order and read every slot"
    for merge in used:
        tile_q = options.tile_q_second if merge["kind"] else options.tile_q
        left = merge["qo_len"] * options.group_size - merge["row_begin"]
        assert merge["num_rows"] == min(left, tile_q) <= info["rows_per_slot"]
        for slot in range(merge["slot_begin"], merge["slot_end"]):
            for name in ("kind", "request", "qo_begin", "qo_len", "kv_len", "row_begin"):
                assert by_slot[slot][name] == merge[name]
    if info["counters_offset"] >= 0:
        count = info["num_merges"] * options.num_kv_heads
        assert len(plan.counters) >= count and not np.any(plan.counters[:count])
        for number, merge in enumerate(used):
            for slot in range(merge["slot_begin"], merge["slot_end"]):
                assert by_slot[slot]["merge_or_taken"] == number
    rows = info["num_slots"] * options.num_kv_heads * info["rows_per_slot"]
    assert info["sums_offset"] >= rows * options.head_dim_vo * 4 and info["sums_offset"] % 256 == 0
    assert info["float_bytes"] == info["sums_offset"] + rows * 8


LENGTHS = st.one_of(st.integers(0, 300), st.integers(0, 9000), st.sampled_from([0, 63, 64, 65]))
TOKENS = st.one_of(st.just(1), st.integers(0, 3), st.integers(0, 400))


@st.composite
def requests(draw: st.DrawFn, max_batch: int = 12) -> Requests:
    kv_len = tuple(draw(st.lists(LENGTHS, max_size=max_batch)))
    size = len(kv_len)
    return Requests(
        draw(
            st.one_of(st.integers(0, 3), st.lists(TOKENS, min_size=size, max_size=size).map(tuple))
        ),
        kv_len,
        page_size=draw(st.sampled_from([0, 1, 16, 48])),
        causal=draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, -1, 0, 1, 100, 4000])),
        first_entry=draw(st.sampled_from([0, 0, 7])),
    )


@st.composite
def launches(draw: st.DrawFn) -> tuple[Options, tuple[Requests, ...]]:
    groups = [draw(requests())]
    split = draw(st.sampled_from([0, 0, 0, 64, 100, 1024]))
    options = Options(
        num_kv_heads=draw(st.sampled_from([1, 2, 5, 8, 32, 300])),
        group_size=draw(st.sampled_from([1, 3, 4, 7, 64])),
        head_dim_vo=draw(st.sampled_from([16, 80, 128])),
        tile_q=draw(st.sampled_from([16, 64, 128, 192])),
        cta_slots=draw(st.sampled_from([1, 20, 132, 264, 396])),
        lone_speed=draw(st.sampled_from([1, 1, 2, 5])),
        piece_tiles=draw(st.sampled_from([1, 1, 2, 3])),
        tile_q_second=draw(st.sampled_from([0, 16, 64])),
        tile_kv=draw(st.sampled_from([64, 64, 128])),
        least_rows=draw(st.sampled_from([0, 0, 17])),
        most_rows=draw(st.sampled_from([ANY_ROWS, ANY_ROWS, 16, 200])),
        fixed_split_size=split,
        disable_split_kv=draw(st.sampled_from([False, False, True])),
    )
    if options.tile_q_second and draw(st.booleans()):
        groups.append(dataclasses.replace(draw(requests()), page_size=groups[0].page_size))
    if draw(st.booleans()):
        tokens = sum(sum(group.qo_lens()) for group in groups)
        batch = sum(len(group.kv_len) for group in groups)
        options = dataclasses.replace(
            options,
            graph_batch_size=batch + draw(st.integers(0, 5)),
            graph_qo_tokens=tokens + draw(st.integers(0, 100)),
            graph_qo_len=draw(
                st.sampled_from([0, max((n for g in groups for n in g.qo_lens()), default=0)])
            ),
        )
    return options, tuple(groups)
