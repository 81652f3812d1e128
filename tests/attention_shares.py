"""Equal shares of a batch: include/flashinfer/scheduler/attention_shares.h, written plainly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Totals:
    """Sums over all tiles of a launch; costs by `TileCost`, in `unit` for each kind of KV tile."""

    unit: list[int]
    piece_tiles: int
    tiles: int = 0
    cost: int = 0
    most: int = 0
    least: float = math.inf
    rows: float = 0.0  # times cost
    most_of: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, kind: int, rows: int, kv_tiles: int) -> None:
        cost = (kv_tiles + self.piece_tiles) * self.unit[kind]
        self.add_tiles(kind, rows, 1, cost, cost, cost)

    def add_tiles(
        self, kind: int, rows: float, tiles: int, cost: int, most: int, least: int
    ) -> None:
        self.tiles += tiles
        self.cost += cost
        self.rows += rows * cost
        self.most, self.least = max(self.most, most), min(self.least, least)
        self.most_of[kind] = max(self.most_of[kind], most)


@dataclass
class Shares:
    """Shares of `columns` that fill the CTA slots `waves` times."""

    totals: Totals
    heads: int
    head_dim_vo: int
    tile_q: int
    tile_kv: int
    columns: int
    waves: int
    two_shapes: bool = False

    def __post_init__(self) -> None:
        totals, unit = self.totals, self.totals.unit[0]
        rows = totals.rows / totals.cost if totals.cost else 0.0
        self.part = 4.0 * rows * self.head_dim_vo * self.heads / 2.8e6
        self.chain = 1 / (32 * max(totals.tiles, 1))
        self.min_piece = max(-(-128 // self.tile_kv), int(self.columns * self.part))
        legal = [(self.min_piece + totals.piece_tiles) * u for u in totals.unit]
        self.least = max(map(min, zip(legal, totals.most_of, strict=True)))
        cuts = (self.columns - 1) * totals.piece_tiles * unit
        self.share = max(self.least, -(-(totals.cost + cuts) // self.columns))
        launch = 2 if self.tile_q > 16 and totals.piece_tiles == 1 else 1
        launch = 4 if self.two_shapes else launch
        parts = 1 if totals.tiles < self.columns else 1.5
        merging = launch + self.columns * (parts * self.part + self.chain)
        self.end = self.waves * self.share + int(merging * unit)


def gpu_columns(slots: int, heads: int) -> int:
    best, best_use = 1, 0.0
    for waves in (1, 2, 3, 4):
        columns = waves * slots // heads
        use = columns * heads / (waves * slots)
        if 1 <= columns <= 32767 and use > best_use + 1e-9:
            best, best_use = columns, use
        if best_use > 0.97:
            break
    return best


def best_shares(
    totals: Totals,
    heads: int,
    head_dim_vo: int,
    slots: int,
    tile_q: int,
    tile_kv: int,
    two_shapes: bool = False,
) -> Shares:
    most = gpu_columns(slots, heads)
    tried = [(w * slots // heads, w) for w in (1, 2, 3, 4) if 1 <= w * slots // heads <= most]
    tried = tried or [(most, -(-most * heads // slots))]
    launch = heads, head_dim_vo, tile_q, tile_kv
    every = [Shares(totals, *launch, *c, two_shapes) for c in tried]
    best = min(every, key=lambda shares: shares.end)
    tiles = totals.tiles
    few = math.sqrt(totals.cost / totals.unit[0] / (best.part + best.chain))
    if tiles < few < best.columns:
        fewer = Shares(totals, *launch, int(few / tiles) * tiles, 1, two_shapes)
        best = min(best, fewer, key=lambda shares: shares.end)
    return best
