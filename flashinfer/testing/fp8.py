"""Operands of products with scales of tiles: quantised to 8 bits, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_E4M3 = torch.float8_e4m3fn
_ORDERS = ("K", "MN")


def _grid(shape: Sequence[int], scale_major_mode: str) -> list[int]:
    """Tiles along each dimension of the operand, of scales of this shape; and the other way."""
    if scale_major_mode not in _ORDERS:
        raise ValueError(f"`scale_major_mode` must be 'K' or 'MN', got {scale_major_mode!r}")
    *batch, rows, columns = shape
    return [*batch, rows, columns] if scale_major_mode == "K" else [*batch, columns, rows]


def _check(x: torch.Tensor, name: str, shape: Sequence[int]) -> None:
    if not isinstance(x, torch.Tensor) or x.ndim not in (2, 3):
        raise ValueError(f"`x` must be a torch.Tensor of 2 or 3 dimensions, got {x!r}")
    if len(shape) != x.ndim or min(shape) < 1:
        raise ValueError(f"`{name}` must have {x.ndim} positive numbers, got {list(shape)}")


def _over_tiles(scales: torch.Tensor, tile: Sequence[int]) -> torch.Tensor:
    """Each number of a grid at all elements of its tile."""
    for dim, size in enumerate(tile):
        scales = scales.repeat_interleave(size, dim)
    return scales


def quantize_fp8(
    x: torch.Tensor,
    scale_shape: Sequence[int],
    tile_shape: Sequence[int],
    scale_major_mode: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix, or a batch of them, to E4M3 with a scale for each tile.

    Parameters
    ----------
    x : torch.Tensor
        ``[m, k]`` or ``[b, m, k]``, of a floating dtype.
    scale_shape : sequence of int
        Shape of the scales: tiles along each dimension, the last two in the order that
        `scale_major_mode` says.
    tile_shape : sequence of int
        Elements of a tile along each dimension of `x`. Tiles times their sizes are x's shape.
    scale_major_mode : {"K", "MN"}
        ``"K"``: scales are ``[.., tiles of m, tiles of k]``; ``"MN"``: the other way round.

    Returns
    -------
    x_fp8 : torch.Tensor
        Shape of `x`, float8_e4m3fn: ``x = x_fp8 * scale``.
    x_scale : torch.Tensor
        `scale_shape`, float32, contiguous: a tile's largest magnitude over 448.

    Raises
    ------
    ValueError
        If an argument is not as described.
    """
    _check(x, "scale_shape", scale_shape)
    _check(x, "tile_shape", tile_shape)
    grid = _grid(scale_shape, scale_major_mode)
    covered = [count * size for count, size in zip(grid, tile_shape, strict=True)]
    if list(x.shape) != covered:
        raise ValueError(
            f"`x` must have shape {covered} for tiles of {list(tile_shape)} and scales of "
            f"{list(scale_shape)}, got {list(x.shape)}"
        )
    sizes = [size for pair in zip(grid, tile_shape, strict=True) for size in pair]
    within = [2 * dim + 1 for dim in range(x.ndim)]
    largest = x.float().abs().reshape(sizes).amax(within)
    # A tile of zeros has the smallest scale, by which zeros can be divided.
    scales = (largest / torch.finfo(_E4M3).max).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (x.float() / _over_tiles(scales, tile_shape)).to(_E4M3)
    return codes, (scales if scale_major_mode == "K" else scales.mT.contiguous())


def dequantize_fp8(x: torch.Tensor, x_scale: torch.Tensor, scale_major_mode: str) -> torch.Tensor:
    """Undo `quantize_fp8`: each element times the scale of its tile.

    Parameters
    ----------
    x : torch.Tensor
        ``[m, k]`` or ``[b, m, k]`` of 8 bits.
    x_scale : torch.Tensor
        Scales, float32. Their number along each dimension divides x's.
    scale_major_mode : {"K", "MN"}
        As for `quantize_fp8`.

    Returns
    -------
    torch.Tensor
        Shape of `x`, float32.

    Raises
    ------
    ValueError
        If an argument is not as described.
    """
    _check(x, "x_scale", x_scale.shape)
    grid = _grid(x_scale.shape, scale_major_mode)
    if any(size % count for size, count in zip(x.shape, grid, strict=True)):
        raise ValueError(
            f"`x_scale` must have numbers of tiles that divide {list(x.shape)}, got "
            f"{list(x_scale.shape)}"
        )
    tile = [size // count for size, count in zip(x.shape, grid, strict=True)]
    scales = x_scale if scale_major_mode == "K" else x_scale.mT
    return x.float() * _over_tiles(scales, tile)
