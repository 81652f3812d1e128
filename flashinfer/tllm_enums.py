"""Enumerations of the public interface."""

from __future__ import annotations

import enum


class SfLayout(enum.IntEnum):
    """Order of the block scales of a quantised matrix: a scale for each row and block of a row.

    Block-scaled tensor cores of Blackwell read tiles; other code reads rows.
    """

    layout_128x4 = 0
    """Tiles of 128 rows by 4 blocks, 512 scales each; within a tile the order from slow to fast is
    row modulo 32, row divided by 32, block. Rows and blocks are padded to whole tiles by zeros."""

    layout_8x4 = 1
    """Tiles of 8 rows by 4 blocks, row-major within a tile; padded likewise."""

    layout_linear = 2
    """Row-major, without padding."""


class TopKTieBreak(enum.IntEnum):
    """Which of the elements equal to the k-th largest are taken."""

    NONE = 0
    """No preference: the smallest indices."""
    SMALL = 1
    """The smallest indices."""
    LARGE = 2
    """The largest indices."""

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
