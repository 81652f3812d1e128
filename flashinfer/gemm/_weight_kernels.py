"""Kernels of the products that read weights once, and the choice among them."""

from __future__ import annotations

import functools

import torch

from .._common.arch import (
    get_compute_capability,
    get_device_sm_count,
    get_shared_bytes_per_block_optin,
)
from .._common.kernels import Kernel
from ..jit.weight_gemm import WeightGemmConfig, gen_weight_gemm_module

_STAGE_BITS = 1024  # of each weight row, that are loaded at a time
_WARP_STAGE_BYTES = 16 * _STAGE_BITS // 8
_TOKENS = (8, 16, 32, 64)
_LEAST_WARPS, _MOST_WARPS = 2, 4
_MOST_SPLITS = 8  # CTAs of a cluster that every GPU can place
_LEAST_STAGES = 4  # for each of them

# The kernel that streams weights has these (gemm/sm90/weight_tile.cuh).
_LEAST_STREAM_COLUMNS, _STREAM_K, _STREAM_WARPS = 128, 256, 8
_STREAM_TOKENS = (8, 16)
_STREAM_GROUPS = {"int4": (0, 128), "mxfp4": (32,), "nvfp4": (16,)}
_STREAM_STAGE_CODES = 1 << 15
_LEAST_STREAM_STAGES = 3  # for each CTA of a cluster
# Columns and warps of CTAs that end with their tile, and how many of them an SM gets, by the tile's
# tokens: the first whose CTAs all run at once. Few columns give all SMs work.
_SINGLE_TILES = {
    8: ((32, 8, 1), (64, 8, 2), (128, 8, 2)),
    16: ((32, 16, 1), (64, 8, 2), (128, 8, 2)),
}


@functools.cache
def get_weight_gemm_kernel(config: WeightGemmConfig) -> Kernel:
    """The loaded kernel, compiled first if need be."""
    return gen_weight_gemm_module(config).build_and_load().weight_gemm


def shared_bytes(weights: str, tokens: int, warps: int) -> int:
    """Shared memory of a CTA, as gemm/portable/tile.cuh says it."""
    plain = weights == "plain"
    chunk_stages = 8 if plain else 2
    stages = 3 if not plain else 8 if warps <= 4 else 4
    activations = 2 * tokens * chunk_stages * 2 * (_STAGE_BITS // weight_bits(weights))
    return warps * stages * _WARP_STAGE_BYTES + activations + 4 * tokens


def weight_bits(weights: str) -> int:
    """Bits of a weight of one of `FORMATS`."""
    return {"plain": 16, "int8": 8}.get(weights, 4)


def is_aligned(scale: torch.Tensor) -> bool:
    """Whether the copy engine can read scales: their rows begin at multiples of 16 bytes."""
    rows = zip(scale.shape[:-1], scale.stride()[:-1], strict=True)
    return scale.data_ptr() % 16 == 0 and all(
        size == 1 or stride * scale.itemsize % 16 == 0 for size, stride in rows
    )


@functools.lru_cache(maxsize=4096)
def choose_weight_config(
    device: torch.device,
    dtype: torch.dtype,
    dtype_out: torch.dtype,
    weights: str,
    dtype_scale: torch.dtype,
    group_size: int,
    rows: int,
    columns: int,
    k: int,
    activation: str = "identity",
    tiles: int | None = None,
    aligned: bool = False,
) -> WeightGemmConfig:
    """The configuration for a product of `rows` tokens with weights ``[columns, k]``.

    In groups, `rows` are those of one of them and `tiles` are the groups that have any. `aligned`
    is what `is_aligned` says of the scales.
    """
    streams = (
        aligned
        and dtype == torch.bfloat16
        and get_compute_capability(device)[0] == 9
        and group_size in _STREAM_GROUPS.get(weights, ())
        and k % _STREAM_K == 0
        and columns >= _LEAST_STREAM_COLUMNS
    )
    tile_columns = 0
    if streams:
        shape = _choose_stream_shape(device, rows, columns, k, tiles)
        tokens, warps, splits, tile_columns = shape
    else:
        tokens, warps, splits = _choose_shape(device, weights, rows, columns, k, tiles or 1)
    return WeightGemmConfig(
        dtype,
        dtype_out,
        weights,
        dtype_scale,
        group_size,
        tokens,
        warps,
        splits,
        activation,
        streams,
        tile_columns,
    )


def _choose_stream_shape(
    device: torch.device, rows: int, columns: int, k: int, tiles: int | None
) -> tuple[int, int, int, int]:
    """Tokens, warps and parts of k, and the columns of CTAs that end with their tile.

    Where such CTAs would not run all at once, and for products in groups, whose number of tiles
    the host does not know, CTAs are persistent. Where they leave half of the SMs idle, pairs of
    them split k. docs/tuning/gemm.md has the measurements.
    """
    tokens = next((size for size in _STREAM_TOKENS if rows <= size), _STREAM_TOKENS[-1])
    sms = get_device_sm_count(device)
    for tile_columns, warps, sm_ctas in _SINGLE_TILES[tokens] if tiles is None else ():
        ctas = -(-columns // tile_columns) * -(-rows // tokens)
        if ctas <= sms * sm_ctas:
            stages = k * tile_columns // _STREAM_STAGE_CODES
            splits = 2 if 2 * ctas <= sms and stages >= 2 * _LEAST_STREAM_STAGES else 1
            return tokens, warps, splits, tile_columns
    return tokens, _STREAM_WARPS, 1, 0


def _choose_shape(
    device: torch.device, weights: str, rows: int, columns: int, k: int, tiles: int
) -> tuple[int, int, int]:
    """Tokens, warps and parts of k.

    Two CTAs for each SM or more keep enough bytes on their way. Where columns alone do not give as
    many, k is split among the CTAs of a cluster; where that is far too few, CTAs have fewer warps.
    docs/tuning/gemm.md has the measurements.
    """
    sms = get_device_sm_count(device)
    limit = get_shared_bytes_per_block_optin(device)
    stages = -(-k * weight_bits(weights) // _STAGE_BITS)
    fitting = [size for size in _TOKENS if shared_bytes(weights, size, _LEAST_WARPS) <= limit]
    tokens = next((size for size in fitting if rows <= size), fitting[-1])

    def ctas(warps: int, splits: int) -> int:
        return -(-columns // (16 * warps)) * -(-rows // tokens) * tiles * splits

    most = _MOST_SPLITS if get_compute_capability(device)[0] >= 9 else 1
    warps, splits = _MOST_WARPS, 1
    while splits < most and stages >= 2 * splits * _LEAST_STAGES and ctas(warps, splits) < 2 * sms:
        splits *= 2
    while warps > _LEAST_WARPS and (
        ctas(warps, splits) < sms // 8 or shared_bytes(weights, tokens, warps) > limit
    ):
        warps //= 2
    return tokens, warps, splits
