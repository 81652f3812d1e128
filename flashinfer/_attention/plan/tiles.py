"""Sizes of the KV tiles and pieces that plans are made of."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...jit.attention.hopper import hopper_tile_kv, is_widened
from .spec import KernelOptions


class KvTiles(NamedTuple):
    """KV tiles of a kernel.

    Attributes
    ----------
    tile_kv : int
        Tokens of a KV tile.
    piece_tiles : int
        KV tiles that starting and ending a work item takes as long as.
    """

    tile_kv: int
    piece_tiles: int


PORTABLE = KvTiles(64, 1)
HOPPER_PIECE_TILES = 2


@functools.cache
def kv_tiles(backend: str, options: KernelOptions) -> KvTiles:
    """Those of the kernel that a backend has for these options."""
    if backend != "fa3":
        return PORTABLE
    widens = is_widened(options.dtype_q, options.dtype_kv)
    tile_kv = hopper_tile_kv(options.head_dim_qk, options.head_dim_vo, widens)
    return KvTiles(tile_kv, HOPPER_PIECE_TILES)
