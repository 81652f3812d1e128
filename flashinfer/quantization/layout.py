"""Layouts of block scales."""

from typing import Any

import torch

from .._common import checks
from .._common.dtypes import check_dtype
from .._instrument.decorator import flashinfer_api
from ..tllm_enums import SfLayout
from ..trace.templates.fp4 import (
    block_scale_interleave_trace,
    nvfp4_block_scale_interleave_trace,
)

_TILE_ROWS = {SfLayout.layout_128x4: 128, SfLayout.layout_8x4: 8, SfLayout.layout_linear: 1}

_SCALE_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16)

KERNEL_LAYOUT = {
    SfLayout.layout_128x4: "swizzled_128x4",
    SfLayout.layout_8x4: "swizzled_8x4",
    SfLayout.layout_linear: "linear",
}
"""Names of the layouts in the kernels' configuration."""


def check_layout(name: str, layout: Any) -> SfLayout:
    """`layout` itself if it is an SfLayout; its number is taken too.

    Raises
    ------
    TypeError, ValueError
        For anything else.
    """
    try:
        return SfLayout(layout)
    except ValueError:
        names = ", ".join(f"SfLayout.{member.name}" for member in SfLayout)
        error = ValueError if isinstance(layout, int) else TypeError
        raise error(f"`{name}` must be one of {names}, got {layout!r}") from None


def padded_shape(layout: SfLayout, rows: int, blocks: int) -> tuple[int, int]:
    """Rows and blocks per row for which `layout` holds a scale."""
    tile_rows = _TILE_ROWS[layout]
    tile_blocks = 1 if layout is SfLayout.layout_linear else 4
    return -(-rows // tile_rows) * tile_rows, -(-blocks // tile_blocks) * tile_blocks


def to_linear(
    name: str, scales: torch.Tensor, layout: SfLayout, rows: int, blocks: int
) -> torch.Tensor:
    """Scales in row-major order, ``[rows, blocks]``, contiguous, padding dropped.

    Raises
    ------
    ValueError
        If `scales`, the argument `name`, has not as many elements as the layout holds.
    """
    padded_rows, padded_blocks = padded_shape(layout, rows, blocks)
    if scales.numel() != padded_rows * padded_blocks:
        raise ValueError(
            f"`{name}` must have {padded_rows} x {padded_blocks} elements for {rows} rows of "
            f"{blocks} blocks, got shape {list(scales.shape)}"
        )
    if layout is SfLayout.layout_128x4:
        tiles = scales.reshape(padded_rows // 128, padded_blocks // 4, 32, 4, 4)
        scales = tiles.permute(0, 3, 2, 1, 4)
    elif layout is SfLayout.layout_8x4:
        scales = scales.reshape(padded_rows // 8, padded_blocks // 4, 8, 4).permute(0, 2, 1, 3)
    return scales.reshape(padded_rows, padded_blocks)[:rows, :blocks].contiguous()


@flashinfer_api(trace=block_scale_interleave_trace)
def block_scale_interleave(
    unswizzled_sf: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Row-major block scales in tiles of 128 rows by 4 blocks (`SfLayout.layout_128x4`).

    For scales that are made once, such as those of weights; `fp4_quantize` and the like write tiles
    themselves. Done in PyTorch, on any device.

    Parameters
    ----------
    unswizzled_sf : torch.Tensor
        ``[rows, blocks]`` or ``[experts, rows, blocks]`` (each expert by itself); uint8,
        float8_e4m3fn, float8_e8m0fnu or bfloat16.
    out : torch.Tensor, optional
        Result, one dimension, contiguous, dtype of `unswizzled_sf`; must not share its memory.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor: ``[experts * rows * blocks]`` with rows padded to a multiple of 128
        and blocks to one of 4, by zeros.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.

    Examples
    --------
    >>> flashinfer.block_scale_interleave(torch.ones(100, 6, dtype=torch.uint8)).shape
    torch.Size([1024])
    """
    checks.tensor("unswizzled_sf", unswizzled_sf)
    check_dtype("unswizzled_sf", unswizzled_sf.dtype, _SCALE_DTYPES)
    if unswizzled_sf.ndim not in (2, 3):
        raise ValueError(
            f"`unswizzled_sf` must have 2 or 3 dimensions, got shape {list(unswizzled_sf.shape)}"
        )
    rows, blocks = unswizzled_sf.shape[-2:]
    padded_rows, padded_blocks = padded_shape(SfLayout.layout_128x4, rows, blocks)
    experts = unswizzled_sf.reshape(unswizzled_sf.shape[:-2].numel(), rows, blocks)
    size = experts.shape[0] * padded_rows * padded_blocks
    if out is None:
        out = torch.empty(size, dtype=unswizzled_sf.dtype, device=unswizzled_sf.device)
    checks.tensor("out", out)
    check_dtype("out", out.dtype, (unswizzled_sf.dtype,))
    if out.shape != (size,) or not out.is_contiguous():
        raise ValueError(f"`out` must be contiguous of shape [{size}], got {list(out.shape)}")
    if out.device != unswizzled_sf.device:
        raise ValueError(f"`out` must be on {unswizzled_sf.device}, got {out.device}")
    padded = unswizzled_sf.new_zeros(experts.shape[0], padded_rows, padded_blocks)
    padded[:, :rows, :blocks] = experts
    tiles = padded.reshape(len(experts), padded_rows // 128, 4, 32, padded_blocks // 4, 4)
    return out.copy_(tiles.permute(0, 1, 4, 3, 2, 5).reshape(size))


@flashinfer_api(trace=nvfp4_block_scale_interleave_trace)
def nvfp4_block_scale_interleave(
    unswizzled_sf: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`block_scale_interleave` by the name that it came under first."""
    return block_scale_interleave(unswizzled_sf, out=out)
