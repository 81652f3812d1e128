"""KV tiles and pieces that plans are made of; the tiles are those of ``attention/kv_tiles.h``."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ...jit.attention.hopper import hopper_tile_q, is_widened
from ...jit.attention.plan import get_attention_plan_module
from .spec import KernelOptions

HOPPER_PLAN_TILES = (64, 128)
"""Tokens by which plans for Hopper's kernel cut keys: one of these, whatever the options."""


class KvTiles(NamedTuple):
    """KV tiles of a kernel.

    Attributes
    ----------
    tile_kv : int
        Tokens of a KV tile.
    piece_tiles : int
        Starting and ending a work item takes as long as this many KV tiles.
    """

    tile_kv: int
    piece_tiles: int


@functools.cache
def portable_tiles() -> KvTiles:
    """Tiles of the portable kernel."""
    return KvTiles(get_attention_plan_module().attention_kv_tile(), 1)


@functools.cache
def hopper_tiles(
    dtype_q: torch.dtype, dtype_kv: torch.dtype, head_dim_qk: int, head_dim_vo: int
) -> KvTiles:
    """Tiles of the kernel for Hopper."""
    tile_q = hopper_tile_q(head_dim_qk, head_dim_vo, dtype_q)
    tile_kv = get_attention_plan_module().attention_hopper_kv_tile(
        dtype_q.itemsize, is_widened(dtype_q, dtype_kv), tile_q, head_dim_qk, head_dim_vo
    )
    return KvTiles(tile_kv, 2)


@functools.cache
def kv_tiles(backend: str, options: KernelOptions) -> KvTiles:
    """Tiles of the kernel that a backend has for these options."""
    if backend != "fa3":
        return portable_tiles()
    head_dims = options.head_dim_qk, options.head_dim_vo
    return hopper_tiles(options.dtype_q, options.dtype_kv, *head_dims)
