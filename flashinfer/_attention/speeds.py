"""How long each attention kernel takes on Hopper: measurements, and the rest of what chooses one.

The model that they are the numbers of is ``include/flashinfer/scheduler/attention_choice.h``. They
are fitted to the times of ``benchmarks/bench_prefill_backends.py`` on an H200
(docs/performance.md).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ..jit.attention.config import tile_rules
from ..jit.attention.hopper import hopper_tile_kv, hopper_tile_q, is_widened
from .tiles import PORTABLE_TILE_KV

_NUM_SMS = 132  # of an H100 and an H200


class TileSpeed(NamedTuple):
    """Of tiles of one number of rows."""

    per_128_keys: float  # microseconds, with as many CTAs on the SM as fit
    ends: float  # to begin and to end a tile, in 128 keys
    alone: float  # factor for a CTA whose SM has no other work
    uneven: float  # of the shortest piece: what the last SM has more than an equal share


class Widened(NamedTuple):
    """Of 8-bit keys of 16-bit queries."""

    few: float  # factor for tiles of 8 and 16 rows, which wait for the keys
    portable: float  # factor for the portable kernel's larger ones
    hopper: float  # factor for Hopper's
    gathered: float


class Speeds(NamedTuple):
    """Of the kernels for one pair of head sizes."""

    start: float  # microseconds, of the portable kernel
    tiles: dict[int, TileSpeed]  # of the portable kernel, by rows
    hopper_start: float
    hopper: TileSpeed
    gathered: float  # factor for pages that threads copy instead of TMA
    widened: Widened
    second: TileSpeed  # of the portable tile of 16 rows, in a launch with a larger one


SPEEDS = {
    (64, 64): Speeds(
        start=0.94,
        tiles={
            16: TileSpeed(1.1, 0.16, 3.1, 0.1),
            64: TileSpeed(1.82, 0.13, 1.77, 0.33),
            128: TileSpeed(1.78, 0.69, 1.41, 1.08),
        },
        hopper_start=4.1,
        hopper=TileSpeed(1.48, 1.51, 0.86, 0.45),
        gathered=1.68,
        widened=Widened(1.39, 1.39, 1.04, 1.81),
        second=TileSpeed(1.24, 0.3, 1.32, 0.4),
    ),
    (96, 96): Speeds(
        start=0.96,
        tiles={
            16: TileSpeed(1.63, 1.01, 2.18, 0.02),
            64: TileSpeed(1.67, 0.36, 1.49, 1.97),
            128: TileSpeed(2.58, 0.6, 1.45, 1.19),
        },
        hopper_start=5.08,
        hopper=TileSpeed(1.62, 0.57, 0.7, 0.58),
        gathered=1.9,
        widened=Widened(1.23, 1.23, 1.01, 1.51),
        second=TileSpeed(1.7, 0.3, 1.28, 0.4),
    ),
    (128, 128): Speeds(
        start=1.01,
        tiles={
            8: TileSpeed(1.0, 0.82, 1.59, 2.89),
            16: TileSpeed(2.06, 0.43, 0.36, 1.21),
            64: TileSpeed(2.23, 0.31, 2.34, 0.31),
            128: TileSpeed(2.97, 0.5, 1.57, 1.1),
        },
        hopper_start=3.61,
        hopper=TileSpeed(1.57, 1.27, 1.08, 0.6),
        gathered=2.09,
        widened=Widened(1.0, 1.47, 1.24, 1.32),
        second=TileSpeed(1.28, 0.17, 1.63, 3.32),
    ),
    (192, 128): Speeds(
        start=0.18,
        tiles={
            16: TileSpeed(2.49, 0.53, 1.06, 1.19),
            64: TileSpeed(2.82, 0.61, 0.74, 1.45),
            128: TileSpeed(6.46, 0.71, 1.02, 0.69),
        },
        hopper_start=5.7,
        hopper=TileSpeed(2.51, 0.74, 0.6, 0.41),
        gathered=1.59,
        widened=Widened(0.89, 0.89, 1.05, 1.51),
        second=TileSpeed(2.68, 0.29, 1.28, 0.4),
    ),
    (256, 256): Speeds(
        start=0.38,
        tiles={
            16: TileSpeed(3.76, 0.95, 0.49, 0.53),
            64: TileSpeed(4.66, 0.46, 1.03, 0.71),
        },
        hopper_start=5.16,
        hopper=TileSpeed(3.98, 0.32, 0.79, 0.36),
        gathered=1.93,
        widened=Widened(0.87, 0.87, 1.09, 1.58),
        second=TileSpeed(4.33, 0.16, 1.02, 0.53),
    ),
}
"""By head sizes (qk, vo)."""


_UNKNOWN = TileSpeed(0.0, 0.0, 0.0, 0.0)


@functools.cache
def kernel_model(
    num_kv_heads: int,
    group_size: int,
    head_dim_qk: int,
    head_dim_vo: int,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    page_size: int,
    tile_q_second: int,
    fixed_split_size: bool,
    with_hopper: bool,
) -> torch.Tensor:
    """The numbers of ``KernelModel`` for launches of one kind.

    Parameters
    ----------
    num_kv_heads, group_size : int
        KV heads, and query heads of each.
    head_dim_qk, head_dim_vo : int
        Head sizes.
    dtype_q, dtype_kv : torch.dtype
        Of queries, and of keys and values.
    page_size : int
        Tokens of a page; 0 for ragged keys.
    tile_q_second : int
        Tile of the requests that fit it, of the portable kernel; 0: there is one shape.
    fixed_split_size : bool
        Whether the portable tile must not depend on the batch.
    with_hopper : bool
        Whether the kernel for Hopper serves the launch, which is then of head sizes in ``SPEEDS``.

    Returns
    -------
    torch.Tensor
        float64 on the CPU, as ``attention_choose`` takes it.
    """
    speeds = SPEEDS[head_dim_qk, head_dim_vo] if with_hopper else None
    hopper, hopper_start, few, portable = _UNKNOWN, math.inf, 1.0, 1.0
    tile_kv = PORTABLE_TILE_KV
    if speeds is not None:
        widens = is_widened(dtype_q, dtype_kv)
        tile_kv = hopper_tile_kv(head_dim_qk, head_dim_vo, widens)
        factor, gathered = 1.0, speeds.gathered
        if widens:
            few, portable, factor, gathered = speeds.widened
        if _are_gathered(page_size, tile_kv):
            factor *= gathered
        hopper_start, hopper = speeds.hopper_start, _slower(speeds.hopper, factor)
    known = speeds.tiles if speeds is not None else {}
    second = _UNKNOWN if speeds is None else _slower(speeds.second, few)
    numbers: list[float] = [
        *(num_kv_heads, group_size, _NUM_SMS, PORTABLE_TILE_KV),
        speeds.start if speeds is not None else 0.0,
        *(tile_q_second, *second),
        *(hopper_tile_q(head_dim_qk, head_dim_vo), tile_kv, hopper_start, *hopper),
    ]
    for rule in tile_rules(head_dim_vo, fixed_split_size):
        # Where nothing else is known, tiles of 8 rows are taken for as fast as those of 16.
        speed = known.get(rule.tile_q, known.get(16, _UNKNOWN))
        numbers += [*rule, *_slower(speed, few if rule.tile_q <= 16 else portable)]
    return torch.tensor(numbers, dtype=torch.float64)


def _slower(speed: TileSpeed, factor: float) -> TileSpeed:
    return speed._replace(per_128_keys=factor * speed.per_128_keys)


def _are_gathered(page_size: int, tile_kv: int) -> bool:
    """Whether no box of TMA fits the pages (kv_box_rows in hopper_launch.cuh)."""
    if page_size == 0 or page_size % tile_kv == 0:
        return False
    return page_size % 8 != 0 or tile_kv % page_size != 0
