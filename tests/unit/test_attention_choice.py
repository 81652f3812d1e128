"""The planner's predictions for the attention kernels, against the model written plainly."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashinfer._attention.plan.planner import ESTIMATE_DTYPE, PlanConfig, estimate_kernels
from flashinfer._attention.plan.spec import AttentionSpec
from flashinfer._attention.plan.speeds import (
    MEMORY,
    MODEL_DTYPE,
    SPEEDS,
    KernelSpeed,
    TileSpeed,
    kernel_model,
)
from flashinfer._attention.plan.tiles import hopper_tiles
from flashinfer.jit.attention.config import choose_tile_q
from flashinfer.jit.attention.hopper import hopper_tile_q, is_widened
from tests.attention_plans import Requests
from tests.attention_shares import Totals, best_shares
from tests.native_structs import struct_dtype

pytestmark = pytest.mark.compiler

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
NUM_SMS = 132


@dataclass(frozen=True)
class Launch:
    """The options of a launch."""

    num_kv_heads: int = 8
    group_size: int = 4
    head_dims: tuple[int, int] = (128, 128)
    kv_dtype: torch.dtype = BF16
    tile_q_second: int = 0
    fixed_split_size: bool = False
    with_hopper: bool = True
    logits_soft_cap: float = 0.0

    def model(self, page_size: int) -> torch.Tensor:
        heads = self.num_kv_heads * self.group_size, self.num_kv_heads, *self.head_dims
        cap = self.logits_soft_cap
        spec = AttentionSpec(*heads, BF16, self.kv_dtype, BF16, sm_scale=1.0, logits_soft_cap=cap)
        options = self.tile_q_second, self.fixed_split_size, self.with_hopper
        return kernel_model(spec, page_size, *options)


def estimated(launch: Launch, batch: Requests) -> tuple[float, ...]:
    return estimate_kernels(launch.model(batch.page_size), batch.group())


# ---- The model, request by request ----


def launch_us(
    launch: Launch,
    batch: Requests,
    requests: list[tuple[int, int]],
    speed: KernelSpeed,
    tile_q: int,
    second: int = 0,
    tile_kv: int = 64,
    piece_tiles: int = 1,
) -> float:
    """Time of one kernel for (rows, keys) of some requests."""
    group, heads, slots = launch.group_size, launch.num_kv_heads, speed.ctas * NUM_SMS
    totals = Totals([32 if q >= 128 else 16 for q in (tile_q, second)], piece_tiles)
    keys, queries, unit_costs = 0.0, 0, 0
    for rows, kv_len in requests:
        if rows == 0:
            continue
        kind = int(rows <= second)
        tile = second if kind else tile_q
        tokens, tiles = tile / group, -(-rows // tile)
        every = -(-kv_len // tile_kv)
        most = least = every
        seen, loaded = float(kv_len), float(every * tiles)
        if batch.window_left >= 0 and batch.window_left + tokens < seen:
            seen = batch.window_left + tokens
            most = least = min(every, int((seen - 1) / tile_kv) + 2)
            loaded = min(loaded, tiles * ((seen - 1) / tile_kv + 1))
        if batch.causal and tiles > 1:
            # The tile in front of the last one sees `tokens` fewer keys, and so on; with a window
            # only from where it is not full.
            before = kv_len - rows // group
            fewer = min(tiles, max(seen - before, 0.0) / tokens)
            partly = 0.5 * (1 - min(tokens / tile_kv, 1.0)) + (0.5 if seen < kv_len else 0.0)
            loaded = most + (tiles - 1) * min(most, seen / tile_kv + partly)
            if fewer > 1:
                loaded -= 0.5 * tokens / tile_kv * fewer * (fewer - 1)
                least = min(most, max(1, -(-(before + int(tokens)) // tile_kv)))
            loaded = max(loaded, tiles)
        unit = totals.unit[kind]
        unit_costs += tiles * unit
        cost = int((loaded + tiles * piece_tiles) * unit)
        ends = [(n + piece_tiles) * unit for n in (most, least)]
        totals.add_tiles(kind, min(rows, tile), tiles, cost, *ends)
        visible = rows // group + batch.window_left if batch.window_left >= 0 else kv_len
        keys += min(kv_len, visible)
        queries += rows // group
    if totals.tiles == 0:
        return speed.start
    shares = best_shares(totals, heads, launch.head_dims[1], slots, tile_q, tile_kv, second > 0)
    lists, end, merging = totals.tiles * heads, float(totals.most), 0.0
    if lists > slots and totals.least == totals.most:
        end *= math.ceil(lists / slots)
    elif lists > slots:
        end = max(end, totals.cost * heads / slots + 0.5 * totals.least)
    if end > shares.end + shares.end // 32:
        parts = shares.columns * (1.0 if totals.tiles < shares.columns else 1.5)
        rows = parts * heads * totals.rows / totals.cost
        lists, end = shares.columns * heads, float(shares.waves * shares.share)
        merging = speed.merge + 4 * rows * launch.head_dims[1] / MEMORY.partial
        merging += MEMORY.per_part * max(1.0, shares.columns / totals.tiles)
    busy = min(1.0, totals.cost * heads / (slots * end))
    pieces = 1 + max(lists / slots - 1, 0.0) * unit_costs / (totals.tiles * totals.unit[0])
    compute = max(end / totals.unit[0] + speed.piece * pieces, 0.1) * speed.per_kv_tile
    compute *= (speed.alone if lists <= NUM_SMS else 1.0) * math.exp(speed.idle * (busy - 1))
    key_bytes = heads * sum(launch.head_dims) * launch.kv_dtype.itemsize
    qo_bytes = heads * group * sum(launch.head_dims) * 2
    loads = MEMORY.first_keys
    loads += (keys * key_bytes + queries * qo_bytes) / (MEMORY.dram * speed.dram)
    p = MEMORY.overlap
    longer = max(compute, loads)
    both = longer * (1 + (min(compute, loads) / longer) ** p) ** (1 / p)
    return speed.start + both + merging


def has_boxes(page_size: int, tile_kv: int) -> bool:
    return page_size in (0, 8, 16, 32, 64, 128) or page_size % tile_kv == 0


def expected(launch: Launch, batch: Requests) -> tuple[float, ...]:
    speeds = SPEEDS[launch.head_dims]
    group, second = launch.group_size, launch.tile_q_second
    requests = [(q * group, k) for q, k in zip(batch.qo_lens(), batch.kv_len, strict=True)]
    few = [r for r in requests if r[0] <= second]
    few_rows = max((rows for rows, _ in few), default=0)
    if few_rows == 0 or len(few) == len(requests):  # one tile serves all
        few, few_rows, second = [], 0, 0
    rest = [r for r in requests if r[0] > second] if second else requests
    rows = [r[0] for r in rest]
    mean = sum(rows) / len(rows) if rows else 0
    tile_q = choose_tile_q(max(rows, default=0), mean, launch.head_dims[1], launch.fixed_split_size)
    widens = is_widened(BF16, launch.kv_dtype)
    tile_kv = hopper_tiles(BF16, launch.kv_dtype, *launch.head_dims).tile_kv
    small_pages = batch.page_size % 16 != 0

    def changed(tile: TileSpeed, small: bool) -> KernelSpeed:
        change, factor, later = tile.changes, 1.0, 0.0
        if launch.logits_soft_cap > 0:
            factor *= change.capped
        if widens:
            factor, later = factor * change.widened, later + change.widened_start
        if small:
            factor, later = factor * change.small_pages, later + change.small_pages_start
        start = max(tile.speed.start + later, 0.0)
        return tile.speed._replace(start=start, per_kv_tile=factor * tile.speed.per_kv_tile)

    def hopper_us(part: list[tuple[int, int]]) -> float:
        speed, tile = changed(speeds.hopper, False), hopper_tile_q(*launch.head_dims)
        if not has_boxes(batch.page_size, tile_kv):
            slower = speeds.gathered_widened if widens else speeds.gathered
            speed = speed._replace(per_kv_tile=slower * speed.per_kv_tile)
        if tile % group != 0:
            speed = speed._replace(piece=speed.piece + speeds.strided_queries)
        return launch_us(launch, batch, part, speed, tile, 0, tile_kv, 2)

    if not second:
        speed = changed(speeds.tiles[tile_q], small_pages)
        portable_us = launch_us(launch, batch, requests, speed, tile_q)
        return tile_q, portable_us, hopper_us(requests), math.inf, 0
    both = changed(speeds.second[tile_q], small_pages)
    one_us = launch_us(launch, batch, requests, both, tile_q, second)
    tile_few = choose_tile_q(few_rows, few_rows, launch.head_dims[1], launch.fixed_split_size)
    speed = changed(speeds.tiles[tile_few], small_pages)
    apart_us = launch_us(launch, batch, few, speed, second) + hopper_us(rest)
    return tile_q, one_us, hopper_us(requests), apart_us, few_rows


def lengths(most: int) -> st.SearchStrategy[int]:
    """As many short ones as long ones."""
    return st.integers(0, most.bit_length()).flatmap(lambda bits: st.integers(0, most >> bits))


@st.composite
def batches(draw: Any) -> Requests:
    pairs = draw(st.lists(st.tuples(lengths(9000), lengths(20_000)), min_size=0, max_size=40))
    return Requests(
        qo_len=tuple(q for q, _ in pairs),
        kv_len=tuple(k for _, k in pairs),
        page_size=draw(st.sampled_from([0, 1, 3, 8, 16, 64, 100, 128, 256])),
        causal=draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, -1, 0, 700])),
        first_entry=draw(st.sampled_from([0, 7])),
    )


LAUNCHES = st.builds(
    Launch,
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
    group_size=st.sampled_from([1, 4, 7, 64]),
    head_dims=st.sampled_from(sorted(SPEEDS)),
    kv_dtype=st.sampled_from([BF16, E4M3]),
    tile_q_second=st.sampled_from([0, 0, 16]),
    logits_soft_cap=st.sampled_from([0.0, 0.0, 30.0]),
)


@settings(
    max_examples=300,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(LAUNCHES, batches())
def test_the_estimate_is_the_model(launch: Launch, batch: Requests):
    assert estimated(launch, batch) == pytest.approx(expected(launch, batch), rel=1e-12)


# ---- What must hold whatever the numbers are ----


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("head_dims", [(64, 64), (80, 80), (256, 256), (512, 512)])
def test_without_the_kernel_for_hopper_only_the_tile_is_estimated(head_dims, fixed):
    launch = Launch(head_dims=head_dims, fixed_split_size=fixed, with_hopper=False)
    for tokens in itertools.product([0, 1, 4, 5, 16, 17, 300], repeat=2):
        tile_q, _, hopper_us, *_ = estimated(launch, Requests(tokens, (64, 64)))
        rows = [4 * n for n in tokens]
        assert tile_q == choose_tile_q(max(rows), sum(rows) / 2, head_dims[1], fixed)
        assert hopper_us == math.inf


def test_lengths_and_not_pages_count():
    """A page of 1024 tokens with one in it is one key."""
    short, page = Requests((1,) * 400, (1,) * 400, 1024), Requests((1,) * 400, (1024,) * 400, 1024)
    assert estimated(Launch(), short)[1] < estimated(Launch(), page)[1]


def test_no_rows_cost_no_more_than_the_start():
    speeds = SPEEDS[128, 128]
    for batch in (Requests((), ()), Requests((0, 0), (5000, 10))):
        starts = speeds.tiles[8].speed.start, speeds.hopper.speed.start
        assert estimated(Launch(), batch) == (8, *starts, math.inf, 0)


def test_counts_are_beyond_32_bits():
    """2^31 - 1024 rows of a request, against 2^31 - 1 keys: nothing wraps around."""
    launch = Launch(num_kv_heads=1, group_size=1)
    keys = 2**31 - 1
    batch = Requests((2**31 - 1025,), (keys,), page_size=0)
    speed = SPEEDS[128, 128].tiles[128].speed
    tiles = math.ceil((2**31 - 1025) / 128)
    us = speed.per_kv_tile * tiles * (keys / 64) / (2 * NUM_SMS)
    assert estimated(launch, batch)[1] == pytest.approx(us, rel=1e-4)


def _without_heads(model: torch.Tensor) -> torch.Tensor:
    changed = model.clone()
    changed.numpy().view(MODEL_DTYPE)["num_kv_heads"] = 0
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: model[:64],
            r"`model` must have at least \d+ aligned bytes.*got shape \[64\]",
        ),
        (lambda model: torch.cat([model, model]), r"`model` must have \d+ bytes, got shape"),
        (lambda model: model.float(), "`model`.*uint8"),
        (_without_heads, "`num_kv_heads` must be from 1 to 2147483647, got 0"),
    ],
)
def test_what_is_no_model_is_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        estimate_kernels(change(Launch().model(16)), Requests((1,), (1,)).group())


def test_structs_have_the_fields_of_the_headers():
    """Python fills and reads them by these names."""
    choice, tiles = "scheduler/attention_choice.h", "scheduler/attention_tiles.h"
    assert struct_dtype(choice, "KernelModel") == MODEL_DTYPE
    assert struct_dtype(choice, "KernelEstimate") == ESTIMATE_DTYPE
    assert struct_dtype(tiles, "PlanConfig").names == PlanConfig._fields
