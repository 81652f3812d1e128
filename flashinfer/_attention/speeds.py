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


class Speeds(NamedTuple):
    """Of the kernels for one pair of head sizes."""

    start: float  # microseconds, of the portable kernel
    tiles: dict[int, TileSpeed]  # of the portable kernel, by rows
    hopper_start: float
    hopper: TileSpeed
    gathered: float  # factor for pages that threads copy instead of TMA
    widened: float  # factor for 8-bit keys of 16-bit queries
    second: TileSpeed  # of the portable tile of 16 rows, in a launch with a larger one


SPEEDS = {
    (64, 64): Speeds(
        start=0.73,
        tiles={
            16: TileSpeed(1.45, 0.24, 1.85),
            64: TileSpeed(1.99, 0.26, 1.81),
            128: TileSpeed(1.78, 0.95, 1.75),
        },
        hopper_start=8.22,
        hopper=TileSpeed(1.8, 1.19, 0.58),
        gathered=1.68,
        widened=1.25,
        second=TileSpeed(1.24, 0.3, 1.32),
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
        second=TileSpeed(1.7, 0.3, 1.28),
    ),
    (128, 128): Speeds(
        start=1.07,
        tiles={
            16: TileSpeed(1.71, 0.1, 1.76),
            64: TileSpeed(2.64, 0.27, 1.92),
            128: TileSpeed(3.5, 0.52, 1.49),
        },
        hopper_start=7.13,
        hopper=TileSpeed(2.09, 1.04, 0.74),
        gathered=1.84,
        widened=1.18,
        second=TileSpeed(1.83, 0.65, 1.63),
    ),
    (192, 128): Speeds(
        start=2.91,
        tiles={
            16: TileSpeed(2.49, 0.43, 0.78),
            64: TileSpeed(3.54, 0.37, 0.74),
            128: TileSpeed(7.1, 0.78, 0.81),
        },
        hopper_start=6.64,
        hopper=TileSpeed(2.62, 1.3, 0.53),
        gathered=1.59,
        widened=1.28,
        second=TileSpeed(2.68, 0.28, 1.28),
    ),
    (256, 256): Speeds(
        start=2.84,
        tiles={
            16: TileSpeed(3.97, 1.0, 0.49),
            64: TileSpeed(5.66, 0.44, 0.76),
        },
        hopper_start=8.47,
        hopper=TileSpeed(4.11, 0.65, 0.44),
        gathered=2.49,
        widened=1.4,
        second=TileSpeed(4.43, 0.3, 0.98),
    ),
}
"""By head sizes (qk, vo)."""


_UNKNOWN = TileSpeed(0.0, 0.0, 0.0)


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
    hopper, hopper_start = _UNKNOWN, math.inf
    tile_kv = PORTABLE_TILE_KV
    if speeds is not None:
        widens = is_widened(dtype_q, dtype_kv)
        tile_kv = hopper_tile_kv(head_dim_qk, head_dim_vo, widens)
        factor = speeds.widened if widens else 1.0
        if _are_gathered(page_size, tile_kv):
            factor *= speeds.gathered
        hopper_start = speeds.hopper_start
        hopper = speeds.hopper._replace(per_128_keys=factor * speeds.hopper.per_128_keys)
    known = speeds.tiles if speeds is not None else {}
    numbers: list[float] = [
        *(num_kv_heads, group_size, _NUM_SMS, PORTABLE_TILE_KV),
        speeds.start if speeds is not None else 0.0,
        *(tile_q_second, *(_UNKNOWN if speeds is None else speeds.second)),
        *(hopper_tile_q(head_dim_qk, head_dim_vo), tile_kv, hopper_start, *hopper),
    ]
    for rule in tile_rules(head_dim_vo, fixed_split_size):
        # Tiles of 8 rows are taken for as fast as those of 16.
        numbers += [*rule, *known.get(max(rule.tile_q, 16), _UNKNOWN)]
    return torch.tensor(numbers, dtype=torch.float64)


def _are_gathered(page_size: int, tile_kv: int) -> bool:
    """Whether no box of TMA fits the pages (kv_box_rows in hopper_launch.cuh)."""
    if page_size == 0 or page_size % tile_kv == 0:
        return False
    return page_size % 8 != 0 or tile_kv % page_size != 0
