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
MEMORY = (2.5, 4.1e6, 1.4e6, 0.05)
"""Microseconds until the first keys come; bytes per microsecond of keys and values, and of partial
results, which are written and read; microseconds per part of a row."""


class CopySpeed(NamedTuple):
    """Speed of a launch that copies."""

    start: float  # microseconds
    bytes_per_us: float  # read and written


COPIES = CopySpeed(3.5, 3.3e6)
"""Of launches that copy or rotate keys before the attention."""
ROTATING = 1.5
"""How much longer the portable kernel takes for a prefill that it rotates (at least)."""
CAPPED = 0.42
"""By how much a KV tile of 128 rows takes longer with a soft cap, in heads of 128: its work is per
weight, so that larger heads, whose products take longer, lose less. Smaller tiles wait anyway."""
STRIDED_QUERIES = 1.4
"""What `KernelSpeed.further` of the Hopper kernel is more where no box holds a tile's queries, as
the group does not divide its rows: threads copy them."""


class KernelSpeed(NamedTuple):
    """Speed of the tiles that have one number of rows."""

    ctas: int  # on an SM
    start: float  # microseconds
    per_kv_tile: float  # microseconds of a CTA, with as many as fit on the SM
    alone: float  # factor for a CTA whose SM has no other
    merge: float  # microseconds of the launch that merges
    further: float  # KV tiles that an SM's further tiles take more than the planner counts


class Widened(NamedTuple):
    """Changes of the speeds for 16-bit queries over 8-bit keys."""

    few: float  # factor for tiles of 8 and 16 rows, which wait for the keys
    portable: float  # factor for the portable kernel's larger ones ...
    portable_start: float  # ... and what these start later
    hopper: float  # factor for Hopper's, as many keys
    gathered: float


class Speeds(NamedTuple):
    """Speeds of the kernels for one pair of head sizes."""

    tiles: dict[int, KernelSpeed]  # of the portable kernel, by rows
    hopper: KernelSpeed
    gathered: float  # factor for pages that threads copy instead of TMA
    widened: Widened
    # Launches with a second tile, by rows of the first, per KV tile of that. With 64 rows it is 0.7
    # of the time with 128, but for heads of 256, which have no larger tile and were fitted.
    second: dict[int, KernelSpeed]


SPEEDS = {
    (64, 64): Speeds(
        tiles={
            8: KernelSpeed(4, 0.0, 1.51, 0.71, 0.7, 0.09),
            16: KernelSpeed(4, 0.97, 1.05, 0.59, 1.44, -0.39),
            64: KernelSpeed(4, 0.18, 1.57, 0.72, 5.75, 1.01),
            128: KernelSpeed(2, 0.4, 1.84, 0.76, 1.28, 0.1),
        },
        hopper=KernelSpeed(1, 3.5, 1.35, 1.0, 2.2, 0.09),
        gathered=1.93,
        widened=Widened(1.29, 1.56, 3.07, 1.4, 1.66),
        second={
            64: KernelSpeed(2, 0.6, 1.39, 0.82, 2.97, 0.5),
            128: KernelSpeed(2, 0.6, 1.98, 0.82, 2.97, 0.63),
        },
    ),
    (96, 96): Speeds(
        tiles={
            8: KernelSpeed(3, 0.05, 1.31, 0.71, 1.32, 0.13),
            16: KernelSpeed(3, 0.66, 1.28, 0.76, 1.17, -0.13),
            64: KernelSpeed(3, 0.0, 2.67, 0.66, 1.95, 0.89),
            128: KernelSpeed(2, 0.86, 2.63, 0.63, 2.48, 0.97),
        },
        hopper=KernelSpeed(1, 1.68, 1.54, 1.0, 0.83, -0.4),
        gathered=1.8,
        widened=Widened(1.2, 1.05, 0.0, 0.93, 1.54),
        second={
            64: KernelSpeed(2, 1.53, 1.83, 0.71, 4.0, 0.5),
            128: KernelSpeed(2, 1.53, 2.62, 0.71, 4.6, -0.21),
        },
    ),
    (128, 128): Speeds(
        tiles={
            8: KernelSpeed(2, 0.0, 1.39, 0.57, 0.56, -0.22),
            16: KernelSpeed(2, 0.68, 1.4, 0.51, 0.86, -0.26),
            64: KernelSpeed(2, 0.05, 2.21, 0.45, 4.34, 0.6),
            128: KernelSpeed(2, 1.29, 2.75, 0.7, 4.46, 1.1),
        },
        hopper=KernelSpeed(1, 3.27, 1.43, 1.0, 0.42, -0.98),
        gathered=2.51,
        widened=Widened(0.75, 1.25, 3.9, 1.01, 1.49),
        second={
            64: KernelSpeed(2, 1.17, 1.43, 0.63, 4.0, 0.5),
            128: KernelSpeed(2, 1.17, 2.04, 0.63, 6.0, 2.0),
        },
    ),
    (192, 128): Speeds(
        tiles={
            8: KernelSpeed(1, 0.0, 1.04, 0.95, 0.86, 0.43),
            16: KernelSpeed(1, 0.95, 1.23, 0.96, 0.94, 0.48),
            64: KernelSpeed(2, 0.71, 2.8, 0.74, 2.68, 1.42),
            128: KernelSpeed(1, 1.29, 3.19, 1.02, 0.2, 0.92),
        },
        hopper=KernelSpeed(1, 2.5, 1.78, 1.0, 1.59, 0.32),
        gathered=1.53,
        widened=Widened(0.74, 0.85, 0.0, 1.06, 1.48),
        second={
            64: KernelSpeed(1, 1.41, 2.32, 1.01, 0.12, 0.5),
            128: KernelSpeed(1, 1.41, 3.31, 1.01, 0.12, 0.33),
        },
    ),
    (256, 256): Speeds(
        tiles={
            8: KernelSpeed(1, 0.0, 1.85, 1.04, 1.03, -1.15),
            16: KernelSpeed(1, 1.42, 1.27, 0.93, 1.55, -0.12),
            64: KernelSpeed(1, 0.0, 2.27, 1.13, 2.21, 1.46),
        },
        hopper=KernelSpeed(1, 3.55, 1.68, 0.89, 0.91, 1.77),
        gathered=2.23,
        widened=Widened(1.01, 1.08, 0.04, 1.03, 1.67),
        second={64: KernelSpeed(1, 0.58, 2.47, 1.02, 6.0, 0.3)},
    ),
}
"""By head sizes (qk, vo)."""


# Element types of queries and of keys that `SPEEDS` was measured with.
_MEASURED = (torch.bfloat16, torch.bfloat16)

_UNKNOWN = KernelSpeed(1, 0.0, 0.0, 0.0, 0.0, 0.0)


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
        ("first_keys", np.float64),
        ("dram", np.float64),
        ("partial", np.float64),
        ("per_part", np.float64),
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
    hopper = _UNKNOWN._replace(start=math.inf)
    few, portable, portable_start, capped = 1.0, 1.0, 0.0, 1.0
    portable_sizes = hopper_sizes = portable_tiles()
    if speeds is not None:
        widens = is_widened(spec.q_data_type, spec.kv_data_type)
        hopper_sizes = hopper_tiles(spec.q_data_type, spec.kv_data_type, *head_dims)
        tile_kv = hopper_sizes.tile_kv
        factor, gathered = 1.0, speeds.gathered
        if widens:
            few, portable, portable_start, factor, gathered = speeds.widened
            factor *= tile_kv / hopper_tiles(*_MEASURED, *head_dims).tile_kv
        if are_gathered(page_size, tile_kv):
            factor *= gathered
        if spec.logits_soft_cap > 0:
            capped += CAPPED * 256 / sum(head_dims)
            factor *= capped
        hopper = _slower(speeds.hopper, factor)
        if hopper_tile_q(*head_dims) % spec.group_size:
            hopper = hopper._replace(further=hopper.further + STRIDED_QUERIES)
    known, both = (speeds.tiles, speeds.second) if speeds is not None else ({}, {})
    model = np.zeros((), MODEL_DTYPE)
    model["num_kv_heads"], model["group_size"] = spec.num_kv_heads, spec.group_size
    model["head_dim_vo"], model["num_sms"] = spec.head_dim_vo, _NUM_SMS
    bits = 4 if spec.kv_data_type == PACKED_FLOAT4 else 8 * spec.kv_data_type.itemsize
    model["key_bytes"] = sum(head_dims) * bits // 8
    model["first_keys"], model["dram"], model["partial"], model["per_part"] = MEMORY
    model["tile_q_second"] = tile_q_second
    model["portable_tile_kv"], model["portable_piece_tiles"] = portable_sizes
    model["hopper_tile_q"] = hopper_tile_q(*head_dims)
    model["hopper_tile_kv"], model["hopper_piece_tiles"] = hopper_sizes
    model["hopper_speed"] = hopper
    rules = tile_rules(spec.tile_head_dim, fixed_split_size)
    model["num_tiles"] = len(rules)
    for tile, rule in zip(model["tiles"], rules, strict=False):
        speed = known.get(rule.tile_q, _UNKNOWN)
        more = portable * (capped if rule.tile_q == 128 else 1.0), portable_start
        tile["tile_q"], tile["most_rows"], tile["mean_rows"] = rule
        tile["speed"] = _slower(speed, *(more if rule.tile_q > 16 else (few, 0.0)))
        tile["both"] = _slower(both.get(rule.tile_q, _UNKNOWN), *more)
    return torch.from_numpy(model[None].view(np.uint8))


def _slower(speed: KernelSpeed, factor: float, later: float = 0.0) -> KernelSpeed:
    return speed._replace(start=speed.start + later, per_kv_tile=factor * speed.per_kv_tile)


def are_gathered(page_size: int, tile_kv: int) -> bool:
    """Whether no box of TMA fits the pages (kv_box_rows in attention/sm90/launch.cuh)."""
    if page_size == 0 or page_size % tile_kv == 0:
        return False
    return page_size % 8 != 0 or tile_kv % page_size != 0
