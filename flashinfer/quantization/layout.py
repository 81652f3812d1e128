"""Layouts of block scales."""

from __future__ import annotations

from typing import Any

import torch

from ..tllm_enums import SfLayout

_TILE_ROWS = {SfLayout.layout_128x4: 128, SfLayout.layout_8x4: 8, SfLayout.layout_linear: 1}

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
    ValueError
        For anything else.
    """
    try:
        return SfLayout(layout)
    except ValueError:
        names = ", ".join(f"SfLayout.{member.name}" for member in SfLayout)
        raise ValueError(f"`{name}` must be one of {names}, got {layout!r}") from None


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
