"""How long each attention kernel would take on Hopper: measurements as data, and a model of them.

A kernel cuts a batch into tiles of query rows; a tile goes over the keys that its rows see, and the
planner gives every SM an equal share of all of it, down to the shortest piece of a tile that is
worth cutting. So a launch takes::

    start + per_128_keys * max(sum over an SM's share, one piece alone * alone)

where each tile counts its keys / 128 and `ends`. The numbers are fitted to the times of
``benchmarks/bench_prefill_backends.py`` on an H200 (docs/performance.md). What counts is which of
two times is smaller: both kernels have the same masks and options, which are left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..jit.attention.hopper import hopper_tile_kv, hopper_tile_q, is_widened
from .problem import AttentionProblem
from .tiles import PORTABLE_TILE_KV, tile_q_of

Numbers = npt.NDArray[Any]

_NUM_SMS = 132  # of an H100 and an H200


class TileSpeed(NamedTuple):
    """Of tiles of one number of rows."""

    per_128_keys: float  # microseconds, with as many CTAs on the SM as fit
    ends: float  # to begin and to end a tile, in 128 keys
    alone: float  # factor for a CTA whose SM has no other work


class Speeds(NamedTuple):
    """Of the kernels for one pair of head sizes."""

    start: float  # microseconds, of the portable kernel
    tiles: dict[int, TileSpeed]  # of the portable kernel, by rows
    hopper_start: float
    hopper: TileSpeed
    gathered: float  # factor for pages that threads copy instead of TMA
    widened: float  # factor for 8-bit keys of 16-bit queries


SPEEDS = {
    (64, 64): Speeds(
        start=2.08,
        tiles={
            16: TileSpeed(1.24, 0.3, 1.32),
            64: TileSpeed(1.44, 0.39, 1.73),
            128: TileSpeed(1.58, 0.46, 1.63),
        },
        hopper_start=6.64,
        hopper=TileSpeed(1.44, 1.07, 0.67),
        gathered=1.68,
        widened=1.25,
    ),
    (96, 96): Speeds(
        start=2.0,
        tiles={
            16: TileSpeed(1.7, 0.3, 1.28),
            64: TileSpeed(1.77, 0.39, 1.49),
            128: TileSpeed(2.42, 0.47, 1.52),
        },
        hopper_start=7.01,
        hopper=TileSpeed(1.73, 0.98, 0.74),
        gathered=1.6,
        widened=1.2,
    ),
    (128, 128): Speeds(
        start=2.07,
        tiles={
            16: TileSpeed(1.87, 0.33, 1.66),
            64: TileSpeed(2.54, 0.27, 2.06),
            128: TileSpeed(3.45, 0.54, 1.47),
        },
        hopper_start=6.99,
        hopper=TileSpeed(2.12, 1.01, 0.81),
        gathered=1.69,
        widened=1.18,
    ),
    (192, 128): Speeds(
        start=2.04,
        tiles={
            16: TileSpeed(2.68, 0.28, 1.28),
            64: TileSpeed(3.63, 0.36, 1.26),
            128: TileSpeed(6.3, 0.59, 1.3),
        },
        hopper_start=6.49,
        hopper=TileSpeed(2.68, 0.99, 0.74),
        gathered=1.6,
        widened=1.28,
    ),
    (256, 256): Speeds(
        start=2.12,
        tiles={
            16: TileSpeed(4.34, 0.44, 1.1),
            64: TileSpeed(5.41, 0.46, 0.8),
        },
        hopper_start=7.25,
        hopper=TileSpeed(4.03, 0.75, 0.44),
        gathered=1.68,
        widened=1.4,
    ),
}
"""By head sizes (qk, vo)."""


class _Work(NamedTuple):
    """The tiles of some requests, of one KV head."""

    tiles: float
    keys: float  # of all tiles
    longest: float  # keys of a tile


class _Share(NamedTuple):
    """What the tiles of some requests are for one SM; keys in units of 128."""

    tiles: float
    keys: float
    piece: float  # the shortest that the longest tile is cut into


def predicted_us(problem: AttentionProblem, tile_q_second: int = 0) -> tuple[float, float]:
    """Microseconds that a batch would take on an H200, by the portable kernel and by Hopper's.

    Parameters
    ----------
    problem : AttentionProblem
        Requests with query lengths of their own, of head sizes in ``SPEEDS``.
    tile_q_second : int
        Tile of the requests that fit it, of the portable kernel; 0: there is one shape.
    """
    speeds = SPEEDS[problem.head_dim_qk, problem.head_dim_vo]
    assert problem.qo_indptr is not None
    qo_indptr, kv_indptr = problem.qo_indptr.numpy(), problem.kv_indptr.numpy()
    if qo_indptr[-1] == 0:
        return speeds.start, speeds.hopper_start
    rows = (qo_indptr[1:] - qo_indptr[:-1]) * problem.group_size
    kv_lens = (kv_indptr[1:] - kv_indptr[:-1]) * float(max(problem.page_size, 1))
    widens = is_widened(problem.q_data_type, problem.kv_data_type)
    tile_kv = hopper_tile_kv(problem.head_dim_qk, problem.head_dim_vo, widens)
    hopper_rows = hopper_tile_q(problem.head_dim_qk, problem.head_dim_vo)
    work = _work(problem, rows, kv_lens, hopper_rows)
    share = _share(problem, work, hopper_rows, tile_kv)
    factor = speeds.widened if widens else 1.0
    if _are_gathered(problem.page_size, tile_kv):
        factor *= speeds.gathered
    hopper_us = speeds.hopper_start + factor * _busy_us([(share, speeds.hopper)])

    tile_q = tile_q_of(problem, False, tile_q_second)
    parts = []
    if tile_q_second > 0:
        are_few = rows <= tile_q_second
        few = _work(problem, rows[are_few], kv_lens[are_few], tile_q_second)
        few_share = _share(problem, few, tile_q_second, PORTABLE_TILE_KV)
        parts.append((few_share, speeds.tiles[tile_q_second]))
        work = _work(problem, rows[~are_few], kv_lens[~are_few], tile_q)
    elif tile_q != hopper_rows:  # else it is the same work
        work = _work(problem, rows, kv_lens, tile_q)
    share = _share(problem, work, tile_q, PORTABLE_TILE_KV)
    parts.append((share, speeds.tiles[tile_q]))
    return speeds.start + _busy_us(parts), hopper_us


def _work(problem: AttentionProblem, rows: Numbers, kv_lens: Numbers, tile_q: int) -> _Work:
    if not len(rows):
        return _Work(0.0, 0.0, 0.0)
    tiles = np.ceil(rows * (1 / tile_q))
    count = float(np.add.reduce(tiles))  # the methods take three times as long
    longest = float(np.maximum.reduce(kv_lens))
    tokens = tile_q / problem.group_size  # of a tile
    if problem.window_left >= 0:
        longest = min(longest, problem.window_left + tokens)
        kv_lens = np.minimum(kv_lens, longest)
    keys = float(tiles.dot(kv_lens))
    if problem.mask_mode in ("causal", "multi_item"):
        # The last tile of a request sees all its keys, each one before it `tokens` fewer.
        keys -= min(0.5 * tokens * (float(tiles.dot(tiles)) - count), 0.5 * keys)
    return _Work(count, keys, longest)


def _share(problem: AttentionProblem, work: _Work, tile_q: int, tile_kv: int) -> _Share:
    # attention_tiles.h: no part of a tile is shorter than this, so that none is twice as long.
    least = max(2 * tile_kv, 4 * tile_q)
    return _Share(
        tiles=work.tiles * problem.num_kv_heads / _NUM_SMS,
        keys=work.keys * problem.num_kv_heads / _NUM_SMS / 128,
        piece=min(work.longest, 2 * least - tile_kv) / 128,
    )


def _busy_us(parts: list[tuple[_Share, TileSpeed]]) -> float:
    """From the first key to the last, of the busiest SM."""
    shared = alone = 0.0
    for share, speed in parts:
        shared += speed.per_128_keys * (share.tiles * speed.ends + share.keys)
        if share.tiles:
            one = speed.per_128_keys * (share.piece + speed.ends) * speed.alone
            alone = max(alone, one)
    return max(shared, alone)


def _are_gathered(page_size: int, tile_kv: int) -> bool:
    """Whether no box of TMA fits the pages (kv_box_rows in hopper_launch.cuh)."""
    if page_size == 0 or page_size % tile_kv == 0:
        return False
    return page_size % 8 != 0 or tile_kv % page_size != 0
