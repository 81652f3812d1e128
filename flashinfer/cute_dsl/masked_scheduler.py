"""Deals tiles of the valid rows of groups to CTAs that stay on their SMs."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute


class MaskedScheduler:
    """Deals the tiles of all groups' valid rows: tile `work`, then as many further as work at once.

    Tiles of a group follow one another down its rows, so that CTAs that run together share weights.
    Every warp computes the same schedule from the counts. What takes a tile is a cluster where CTAs
    share weights.

    Parameters
    ----------
    counts : cute.Tensor
        Valid rows of each group.
    most : Int32
        Rows that a group has at most.
    columns : Int32
        Tiles along the columns.
    height : int
        Rows of a tile.
    """

    def __init__(self, counts: cute.Tensor, most: Int32, columns: Int32, height: int):
        self.counts, self.most, self.columns, self.height = counts, most, columns, height

    # These two let a loop at run time carry an object.
    def __extract_mlir_values__(self):
        return [v for part in self._parts() for v in cutlass.extract_mlir_values(part)]

    def __new_from_mlir_values__(self, values):
        rest, parts = list(values), []
        for part in self._parts():
            count = len(cutlass.extract_mlir_values(part))
            parts.append(cutlass.new_from_mlir_values(part, rest[:count]))
            rest = rest[count:]
        counts, most, columns = parts
        return MaskedScheduler(counts, most, columns, self.height)

    def _parts(self):
        return self.counts, self.most, self.columns

    @cute.jit
    def rows_of(self, group: Int32):
        """Valid rows of a group."""
        return cutlass.min(cutlass.max(self.counts[group], 0), self.most)

    @cute.jit
    def find(self, work: Int32, group: Int32, first: Int32):
        """The group that a tile lies in, from `group` on, whose first tile is `first`.

        Returns the group, or the number of groups after the last tile, and its first tile.
        """
        groups = self.counts.shape[0]
        searching = Int32(1)
        while searching == 1:
            tiles = Int32(0)
            if group < groups:
                tiles = cute.ceil_div(self.rows_of(group), self.height) * self.columns
            if group >= groups or work < first + tiles:
                searching = Int32(0)
            else:
                first += tiles
                group += 1
        return group, first

    @cute.jit
    def tile_of(self, work: Int32, group: Int32, first: Int32):
        """Row and column of a tile within its group, in tiles."""
        down = cute.ceil_div(self.rows_of(group), self.height)
        local = work - first
        return local % down, local // down
