"""How long each attention kernel takes on Hopper: measurements, and the rest of what chooses one.

The model that they are the numbers of is ``include/flashinfer/scheduler/attention_choice.h``. They
are fitted to the times of ``benchmarks/bench_prefill_backends.py`` on an H200
(docs/tuning/kernel_choice.md).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

from ...jit.attention.config import PACKED_FLOAT4, tile_rules
from ...jit.attention.hopper import hopper_tile_q, is_widened
from .spec import AttentionSpec
from .tiles import hopper_tiles, portable_tiles

_NUM_SMS = 132  # of an H100 and an H200
_LOOKED_UP = 16  # tokens that the portable kernel finds by one page number


class Memory(NamedTuple):
    """Speeds of memory."""

    first_keys: float  # microseconds until the first keys come
    dram: float  # bytes per microsecond of queries, keys, values and output
    partial: float  # bytes per microsecond of partial results, which are written and read
    per_part: float  # microseconds per part of a row
    overlap: float  # how sharply the longer of computing and loading alone counts


MEMORY = Memory(2.75, 4.52e6, 1.61e6, 0.023, 3.98)


class CopySpeed(NamedTuple):
    """Speed of a launch that copies."""

    start: float  # microseconds
    bytes_per_us: float  # read and written


COPIES = CopySpeed(2.4, 4.49e6)
"""Of launches that copy or rotate keys before the attention."""
ROTATING = 1.5
"""How much longer the portable kernel takes for a prefill that it rotates (at least)."""


class KernelSpeed(NamedTuple):
    """Speed of the tiles that have one number of rows: ``KernelSpeed`` of the header."""

    ctas: int  # on an SM
    start: float  # microseconds
    per_kv_tile: float  # microseconds of a CTA, with as many as fit on the SM
    alone: float  # factor for a CTA whose SM has no other
    idle: float  # how much faster, in logarithms, one CTA would be than all of them
    merge: float  # microseconds of the launch that merges
    piece: float  # KV tiles that a tile takes more than the planner counts
    dram: float  # share of the memory's speed


class Changes(NamedTuple):
    """Changes by options of a launch."""

    capped: float  # factor for a soft cap
    widened: float  # factor for 16-bit queries over 8-bit keys ...
    widened_start: float  # ... and what a launch of these starts later
    small_pages: float  # factor for pages whose rows are not looked up 16 at a time ...
    small_pages_start: float  # ... and what a launch starts later


class TileSpeed(NamedTuple):
    """Speed of tiles, and what changes it."""

    speed: KernelSpeed
    changes: Changes


class Speeds(NamedTuple):
    """Speeds of the kernels for one pair of head sizes."""

    tiles: dict[int, TileSpeed]  # of the portable kernel, by rows
    hopper: TileSpeed
    gathered: float  # factor for pages that threads copy instead of TMA ...
    gathered_widened: float  # ... of 8-bit keys
    # What `piece` of the Hopper kernel is more where no box holds a tile's queries, as the group
    # does not divide its rows: threads copy them.
    strided_queries: float
    # Launches with a second tile, by rows of the first, per KV tile of that.
    second: dict[int, TileSpeed]


SPEEDS = {
    (64, 64): Speeds(
        tiles={
            8: TileSpeed(
                KernelSpeed(4, 0.77, 1.61, 0.69, 0.09, 1.52, -0.26, 1.05),
                Changes(1.03, 1.15, -0.35, 0.98, 0.25),
            ),
            16: TileSpeed(
                KernelSpeed(4, 1.15, 1.08, 0.59, 0.05, 1.45, -0.27, 0.81),
                Changes(1.0, 1.35, 0.01, 1.02, 0.1),
            ),
            64: TileSpeed(
                KernelSpeed(4, 0.27, 2.02, 0.76, 0.37, 3.83, -0.33, 0.81),
                Changes(1.06, 1.35, 0.71, 1.07, 0.78),
            ),
            128: TileSpeed(
                KernelSpeed(2, 0.64, 1.93, 0.91, 0.4, 3.11, 0.44, 1.03),
                Changes(1.31, 1.63, 3.52, 0.99, 0.58),
            ),
        },
        hopper=TileSpeed(
            KernelSpeed(1, 3.63, 1.47, 0.92, 0.08, 2.42, -0.25, 1.02),
            Changes(1.45, 0.76, -0.51, 1.0, 0.0),
        ),
        gathered=1.7,
        gathered_widened=1.66,
        strided_queries=0.84,
        second={
            64: TileSpeed(
                KernelSpeed(2, 0.29, 1.36, 0.82, 0.08, 2.89, 0.04, 0.99),
                Changes(1.0, 1.56, 3.07, 1.0, 0.0),
            ),
            128: TileSpeed(
                KernelSpeed(2, 0.0, 2.11, 1.22, 0.56, 4.61, 0.3, 1.04),
                Changes(1.84, 1.56, 3.07, 0.94, -0.08),
            ),
        },
    ),
    (96, 96): Speeds(
        tiles={
            8: TileSpeed(
                KernelSpeed(3, 0.0, 1.31, 0.71, 0.0, 1.32, 0.13, 1.0),
                Changes(1.0, 1.2, 0.0, 1.1, 0.0),
            ),
            16: TileSpeed(
                KernelSpeed(3, 0.79, 1.28, 0.76, 0.0, 1.17, -0.13, 1.0),
                Changes(1.0, 1.2, 0.0, 1.1, 0.0),
            ),
            64: TileSpeed(
                KernelSpeed(3, 0.0, 2.67, 0.66, 0.0, 1.95, 0.89, 1.0),
                Changes(1.0, 1.05, 0.0, 1.1, 0.0),
            ),
            128: TileSpeed(
                KernelSpeed(2, 0.0, 2.63, 0.63, 0.0, 2.48, 0.97, 1.0),
                Changes(1.56, 1.05, 0.0, 1.1, 0.0),
            ),
        },
        hopper=TileSpeed(
            KernelSpeed(1, 2.3, 1.54, 1.0, 0.0, 0.83, -0.4, 1.0), Changes(1.56, 0.93, 0.0, 1.0, 0.0)
        ),
        gathered=1.8,
        gathered_widened=1.54,
        strided_queries=1.4,
        second={
            64: TileSpeed(
                KernelSpeed(2, 0.88, 1.83, 0.71, 0.0, 4.0, 0.5, 1.0),
                Changes(1.0, 1.05, 0.0, 1.1, 0.0),
            ),
            128: TileSpeed(
                KernelSpeed(2, 1.92, 2.62, 0.71, 0.0, 4.6, -0.21, 1.0),
                Changes(1.56, 1.05, 0.0, 1.1, 0.0),
            ),
        },
    ),
    (128, 128): Speeds(
        tiles={
            8: TileSpeed(
                KernelSpeed(2, 0.0, 1.42, 0.68, -0.08, 1.2, -0.82, 1.04),
                Changes(0.98, 0.5, 0.2, 1.06, 0.54),
            ),
            16: TileSpeed(
                KernelSpeed(2, 0.9, 1.28, 0.54, 0.11, 1.32, -0.78, 0.97),
                Changes(1.02, 0.86, 1.02, 1.0, 0.14),
            ),
            64: TileSpeed(
                KernelSpeed(2, 0.53, 1.94, 0.9, 0.12, 3.61, 0.19, 1.04),
                Changes(0.86, 1.08, 2.54, 1.1, 0.45),
            ),
            128: TileSpeed(
                KernelSpeed(2, 0.27, 2.98, 0.88, 0.29, 4.91, 0.88, 1.21),
                Changes(1.29, 1.35, 4.76, 1.0, -0.02),
            ),
        },
        hopper=TileSpeed(
            KernelSpeed(1, 3.97, 1.66, 0.95, 0.09, 1.01, -1.02, 1.11),
            Changes(1.16, 0.99, -0.05, 1.0, 0.0),
        ),
        gathered=2.31,
        gathered_widened=1.56,
        strided_queries=1.2,
        second={
            64: TileSpeed(
                KernelSpeed(2, 0.49, 1.5, 0.65, 0.04, 2.82, -0.38, 0.99),
                Changes(1.0, 1.51, 3.54, 0.97, -0.37),
            ),
            128: TileSpeed(
                KernelSpeed(2, 1.91, 2.59, 0.89, 0.65, 5.44, 0.35, 0.97),
                Changes(1.42, 1.43, 3.81, 0.94, 0.11),
            ),
        },
    ),
    (192, 128): Speeds(
        tiles={
            8: TileSpeed(
                KernelSpeed(1, 0.5, 0.95, 0.94, 0.08, 1.24, 0.72, 1.12),
                Changes(1.0, 0.75, 0.8, 1.04, 0.33),
            ),
            16: TileSpeed(
                KernelSpeed(1, 1.24, 1.1, 0.86, 0.02, 1.17, 0.39, 1.11),
                Changes(1.0, 0.85, 0.39, 1.01, 0.04),
            ),
            64: TileSpeed(
                KernelSpeed(2, 0.34, 2.95, 0.68, 0.1, 2.6, 0.41, 0.91),
                Changes(1.0, 1.24, 0.22, 0.97, -0.02),
            ),
            128: TileSpeed(
                KernelSpeed(1, 1.52, 3.16, 0.97, 0.19, 2.08, 0.74, 0.98),
                Changes(1.34, 0.98, 0.51, 1.02, -0.11),
            ),
        },
        hopper=TileSpeed(
            KernelSpeed(1, 2.71, 1.95, 1.07, 0.2, 0.98, -0.34, 0.99),
            Changes(1.34, 0.74, -0.06, 1.0, 0.0),
        ),
        gathered=2.33,
        gathered_widened=1.48,
        strided_queries=0.93,
        second={
            64: TileSpeed(
                KernelSpeed(1, 0.24, 2.32, 1.01, 0.0, 0.12, 0.5, 1.0),
                Changes(1.0, 0.85, 0.0, 1.1, 0.0),
            ),
            128: TileSpeed(
                KernelSpeed(1, 0.31, 3.31, 1.01, 0.0, 0.12, 0.33, 1.0),
                Changes(1.34, 0.85, 0.0, 1.1, 0.0),
            ),
        },
    ),
    (256, 256): Speeds(
        tiles={
            8: TileSpeed(
                KernelSpeed(1, 0.0, 1.36, 0.88, 0.05, 0.9, 0.77, 1.02),
                Changes(0.94, 0.94, 0.47, 1.02, 0.17),
            ),
            16: TileSpeed(
                KernelSpeed(1, 1.52, 1.43, 0.88, -0.07, 1.33, 0.22, 1.0),
                Changes(0.97, 0.84, 0.18, 1.02, 0.06),
            ),
            64: TileSpeed(
                KernelSpeed(1, 0.27, 2.34, 0.98, 0.08, 2.12, 0.33, 0.84),
                Changes(1.11, 0.97, 1.58, 1.0, 0.57),
            ),
        },
        hopper=TileSpeed(
            KernelSpeed(1, 3.16, 1.64, 0.86, -0.03, 0.45, 0.26, 1.01),
            Changes(1.08, 1.19, -1.15, 1.0, 0.0),
        ),
        gathered=2.31,
        gathered_widened=1.67,
        strided_queries=0.65,
        second={
            64: TileSpeed(
                KernelSpeed(1, 0.28, 2.19, 0.95, 0.18, 6.27, 0.57, 0.94),
                Changes(1.0, 1.08, 0.04, 1.0, 0.05),
            ),
        },
    ),
}
"""By head sizes (qk, vo)."""


_UNKNOWN = KernelSpeed(1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


_SPEED_DTYPE = np.dtype(
    [("ctas", np.int64)] + [(name, np.float64) for name in KernelSpeed._fields if name != "ctas"]
)
_TILE_DTYPE = np.dtype(
    [
        ("tile_q", np.int64),
        ("most_rows", np.float64),
        ("mean_rows", np.float64),
        ("speed", _SPEED_DTYPE),
        ("both", _SPEED_DTYPE),
    ]
)
MODEL_DTYPE = np.dtype(
    [
        ("num_kv_heads", np.int64),
        ("group_size", np.int64),
        ("head_dim_vo", np.int64),
        ("num_sms", np.int64),
        ("key_bytes", np.int64),
        ("qo_bytes", np.int64),
        ("first_keys", np.float64),
        ("dram", np.float64),
        ("partial", np.float64),
        ("per_part", np.float64),
        ("overlap", np.float64),
        ("tile_q_second", np.int64),
        ("portable_tile_kv", np.int64),
        ("portable_piece_tiles", np.int64),
        ("hopper_tile_q", np.int64),
        ("hopper_tile_kv", np.int64),
        ("hopper_piece_tiles", np.int64),
        ("hopper_speed", _SPEED_DTYPE),
        ("num_tiles", np.int64),
        ("tiles", _TILE_DTYPE, 4),
    ]
)
"""``KernelModel`` of the header."""


@functools.lru_cache(maxsize=256)
def kernel_model(
    spec: AttentionSpec,
    page_size: int,
    tile_q_second: int,
    fixed_split_size: bool,
    with_hopper: bool,
) -> torch.Tensor:
    """The bytes of a ``KernelModel`` for launches of one kind.

    Parameters
    ----------
    spec : AttentionSpec
        Heads and element types.
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
        uint8 on the CPU, as ``attention_estimate`` takes it.
    """
    head_dims = spec.head_dim_qk, spec.head_dim_vo
    speeds = SPEEDS[head_dims] if with_hopper else None
    widens = is_widened(spec.q_data_type, spec.kv_data_type)
    capped = spec.logits_soft_cap > 0
    hopper = _UNKNOWN._replace(start=math.inf)
    portable_sizes = hopper_sizes = portable_tiles()
    if speeds is not None:
        hopper_sizes = hopper_tiles(spec.q_data_type, spec.kv_data_type, *head_dims)
        hopper = _changed(speeds.hopper, capped, widens)
        if are_gathered(page_size, hopper_sizes.tile_kv):
            gathered = speeds.gathered_widened if widens else speeds.gathered
            hopper = hopper._replace(per_kv_tile=gathered * hopper.per_kv_tile)
        if hopper_tile_q(*head_dims) % spec.group_size:
            hopper = hopper._replace(piece=hopper.piece + speeds.strided_queries)
    known, both = (speeds.tiles, speeds.second) if speeds is not None else ({}, {})
    model = np.zeros((), MODEL_DTYPE)
    model["num_kv_heads"], model["group_size"] = spec.num_kv_heads, spec.group_size
    model["head_dim_vo"], model["num_sms"] = spec.head_dim_vo, _NUM_SMS
    bits = 4 if spec.kv_data_type == PACKED_FLOAT4 else 8 * spec.kv_data_type.itemsize
    model["key_bytes"] = sum(head_dims) * bits // 8
    model["qo_bytes"] = spec.num_qo_heads * sum(head_dims) * spec.q_data_type.itemsize
    for name, value in zip(MEMORY._fields, MEMORY, strict=True):
        model[name] = value
    model["tile_q_second"] = tile_q_second
    model["portable_tile_kv"], model["portable_piece_tiles"] = portable_sizes
    model["hopper_tile_q"] = hopper_tile_q(*head_dims)
    model["hopper_tile_kv"], model["hopper_piece_tiles"] = hopper_sizes
    model["hopper_speed"] = hopper
    rules = tile_rules(spec.tile_head_dim, fixed_split_size)
    model["num_tiles"] = len(rules)
    for tile, rule in zip(model["tiles"], rules, strict=False):
        tile["tile_q"], tile["most_rows"], tile["mean_rows"] = rule
        for name, speeds_of in (("speed", known), ("both", both)):
            found = speeds_of.get(rule.tile_q)
            small = page_size % _LOOKED_UP != 0
            tile[name] = _UNKNOWN if found is None else _changed(found, capped, widens, small)
    return torch.from_numpy(model[None].view(np.uint8))


def _changed(tile: TileSpeed, capped: bool, widens: bool, small_pages: bool = False) -> KernelSpeed:
    factor, later, changes = 1.0, 0.0, tile.changes
    if capped:
        factor *= changes.capped
    if widens:
        factor, later = factor * changes.widened, later + changes.widened_start
    if small_pages:
        factor, later = factor * changes.small_pages, later + changes.small_pages_start
    speed = tile.speed
    start = max(speed.start + later, 0.0)
    return speed._replace(start=start, per_kv_tile=factor * speed.per_kv_tile)


def are_gathered(page_size: int, tile_kv: int) -> bool:
    """Whether no box of TMA fits the pages (kv_box_rows in attention/sm90/launch.cuh)."""
    if page_size == 0 or page_size % tile_kv == 0:
        return False
    return page_size % 8 != 0 or tile_kv % page_size != 0
