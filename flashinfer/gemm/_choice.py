"""Which kernel a product gets: an analytic model of its time, evaluated for a few tiles.

The time is the longest one of three: what the tensor cores of the busiest CTA take, what L2 takes
to deliver every tile's operands, and what memory takes to deliver them once. The constants are
those of one H200; docs/tuning/gemm.md says where they come from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..jit.gemm import GATED, GemmConfig

_CLUSTERS = {1: 132, 2: 66, 4: 30}
"""CTAs of a cluster to clusters that an H200 runs at a time."""
_CLOCK = 1700.0  # per microsecond
_BYTES = 3.9e6  # of memory per microsecond
_CACHE_BYTES = 7.5e6  # of L2 per microsecond
_OVERLAP = 0.1  # of the shorter times, which are not wholly hidden by the longest
_LAUNCH = 4.0  # microseconds before and after the products of a CTA
_SPLIT = 1.5  # microseconds in which CTAs of a cluster add up their sums
_STORE = 0.6  # microseconds to store a tile
_LEAST_CLOCKS = 310  # that a CTA takes for a stage, however small
_MAX_TOKENS = 128  # up to which rows of weights are the tensor cores' rows


@dataclass(frozen=True)
class GemmProblem:
    """The shapes and types that decide which kernel runs.

    Attributes
    ----------
    rows : int
        Rows of each batch or masked group, or of all groups together where they are neighbours.
    columns, k : int
        Columns and terms of each product.
    batches : int
        Batches, groups or experts.
    scale, groups, activation, gathers
        As in `GemmConfig`.
    """

    dtype_a: torch.dtype
    dtype_b: torch.dtype
    dtype_out: torch.dtype
    rows: int
    columns: int
    k: int
    batches: int = 1
    scale: str = "none"
    groups: str = "batch"
    activation: str = "identity"
    gathers: bool = False

    @property
    def group_rows(self) -> int:
        """Rows that meet one matrix of b, on average."""
        if self.groups in ("offsets", "lengths", "indices"):
            return -(-self.rows // max(self.batches, 1))
        return self.rows

    @property
    def gated(self) -> bool:
        """Whether the activation halves the columns."""
        return self.activation in GATED


@functools.lru_cache(maxsize=4096)
def choose_config(problem: GemmProblem) -> GemmConfig:
    """The configuration that the model finds fastest."""
    return min(_candidates(problem), key=lambda config: estimate(problem, config))


def _candidates(problem: GemmProblem) -> Iterator[GemmConfig]:
    """Few tokens make the right operand; otherwise tiles are as large as registers allow."""
    base = GemmConfig(
        problem.dtype_a,
        problem.dtype_b,
        problem.dtype_out,
        128,
        128,
        scale=problem.scale,
        groups=problem.groups,
        activation=problem.activation,
        gathers=problem.gathers,
    )
    gated = problem.gated
    if problem.groups != "indices" and problem.group_rows <= _MAX_TOKENS:
        yield from _narrow(base, _rows_of_tile(problem.group_rows), gated)
        if problem.group_rows <= _MAX_TOKENS // 2:
            return
    if problem.groups == "indices":
        shared = [replace(base, cluster_columns=columns) for columns in (1, 2)]
    elif problem.gathers:
        shared = [base]
    else:
        pairs: tuple[int, ...] = (1, 2) if problem.group_rows > base.tile_rows else (1,)
        shared = [replace(base, cluster_rows=rows) for rows in pairs]
    is_16_bit = problem.dtype_a.itemsize == 2
    widths: tuple[int, ...] = (256, 128) if gated or not is_16_bit else (256, 224, 192, 128)
    # Sums of all columns with a scale each, beside their products, have no registers at 256.
    if problem.scale in ("group", "token_channel"):
        widths = widths[-1:]
    for tile in shared:
        for columns in widths:
            yield replace(tile, tile_columns=columns)
    if problem.scale == "block" and problem.groups == "batch" and not gated and len(shared) == 2:
        yield replace(base, tile_rows=256, cluster_rows=2)


def _narrow(base: GemmConfig, tile_rows: int, gated: bool) -> Iterator[GemmConfig]:
    narrow = replace(base, tile_rows=tile_rows, swap=True)
    for columns, consumers in ((64, 1), (128, 2)):
        # A warpgroup has 64 gate rows and their 64 up rows.
        tile = replace(narrow, tile_columns=columns * (2 if gated else 1), consumers=consumers)
        for shared in (1, 2):
            if shared == 2 and (base.gathers or tile_rows < 16):
                continue
            for splits in (1, 2):
                if splits == 1 or base.groups == "batch":
                    yield replace(tile, cluster_columns=shared, splits=splits)


def _rows_of_tile(rows: int) -> int:
    return next(size for size in (8, 16, 32, 64, 128) if rows <= size)


def estimate(problem: GemmProblem, config: GemmConfig) -> float:
    """Microseconds that the model expects."""
    element = problem.dtype_a.itemsize
    blocks = -(-problem.k * element // 128)
    blocks = -(-blocks // config.splits)
    out_columns = config.tile_columns // (2 if problem.gated else 1)
    columns = problem.columns // (2 if problem.gated else 1)
    row_units = -(-problem.group_rows // (config.tile_rows * config.cluster_rows))
    column_units = -(-columns // (out_columns * config.cluster_columns))
    cluster = config.cluster_rows * config.cluster_columns * config.splits
    units = row_units * column_units * problem.batches
    rounds = -(-units // _CLUSTERS[cluster])
    clocks = max(_block_clocks(config, element), _LEAST_CLOCKS)
    compute = rounds * (blocks * clocks / _CLOCK + _STORE)
    # What the other CTA of a cluster does not load comes from L2.
    loaded = 128 * (
        config.tile_rows / config.cluster_columns + config.tile_columns / config.cluster_rows
    )
    cache = units * cluster * blocks * loaded / _CACHE_BYTES
    weights = problem.batches * problem.columns * problem.k * element
    rows = problem.batches * problem.group_rows * (problem.k * element + 2 * columns)
    parts = sorted((compute, cache, (weights + rows) / _BYTES))
    overhead = _LAUNCH + (_SPLIT if config.splits > 1 else 0.0)
    return overhead + parts[2] + _OVERLAP * (parts[0] + parts[1])


def _block_clocks(config: GemmConfig, element: int) -> float:
    """Clocks of a stage: 128 bytes of k of both operands."""
    products = config.tile_rows * config.tile_columns * (128 // element) * 2
    clocks = products / (4096 if element == 2 else 8192)
    overhead = 80.0
    if element == 1:  # sums are promoted
        area = config.tile_rows * config.tile_columns
        overhead = 160.0 + area / 154 + (120.0 if config.swap else 0.0)
        overhead += 60.0 if config.tile_rows == 256 else 0.0
    return clocks + overhead
