"""Which kernel a product gets: an analytic model of its time, evaluated for a few tiles.

The time is the longest one of three: what the tensor cores of the busiest CTA take, what L2 takes
to deliver every tile's operands, and what memory takes to deliver them once. The constants are
those of one H200; docs/tuning/gemm.md says where they come from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .._common.dtypes import FLOAT8
from ..jit.gemm import GATED, GemmConfig

_CLUSTERS = {1: 132, 2: 66, 3: 42, 4: 30}
"""CTAs of a cluster to clusters that an H200 runs at a time."""
_CLOCK = 1700.0  # per microsecond
_BYTES = 3.9e6  # of memory per microsecond
_CACHE_BYTES = 7.5e6  # of L2 per microsecond
_FEW_CACHE_BYTES = 5.8e6  # the same for few tokens without groups
_ROUTED_CTA_BYTES = 4.5e4  # that a CTA loads per microsecond for few routed rows
_FEW_CTA_BYTES = {1: 4.0e4, 2: 6.0e4}  # the same for few tokens, by the bytes of an element
_FEW_BYTES = 4.1e6  # of memory per microsecond for few tokens with scales of blocks
_FEW_STAGE = 0.27  # microseconds in which a CTA draws a stage there, however small
_FEW_OUTSIDE_CLOCKS = 22  # that a row of a box takes there which a does not have
_FEW_PROMOTION = 2.5 / 64  # clocks to promote a sum there
_OVERLAP = 0.1  # of the shorter times, which are not wholly hidden by the longest
_LAUNCH = 4.0  # microseconds before and after the products of a CTA
_SPLIT = 1.5  # microseconds in which CTAs of a cluster add up their sums
_STORE = 0.6  # microseconds to store a tile
_HIDDEN_STORE = 3.5  # that a tile takes less if it is stored as a whole; the last one a third of it
_STORING_ROWS = 256  # of a group, from which on that shows: below, memory is the bound
_PAIR = 1.04  # times that CTAs of a pair take for large tiles of 8 bits: they wait for each other
_TALL = 1.2  # that a tile of 256 rows takes longer
_STORING_STAGES = 3  # with which a whole tile of 128 x 256 can wait for its store; 4 of 128 x 192
_LEAST_CLOCKS = 310  # that a CTA takes for a stage, however small
_OUTSIDE_CLOCKS = 20  # that the copy engine takes for a row of a box that a does not have
_MAX_TOKENS = 128  # up to which rows of weights are the tensor cores' rows
_NEAR = 1.5  # times the model's least time: what may be the fastest one in truth
_MOST_MEASURED = 12  # since each one is a module to compile


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
    routed : bool
        Rows choose their group at random; else groups have equally many.
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
    routed: bool = False

    @property
    def group_rows(self) -> int:
        """Rows that meet one matrix of b, on average."""
        if self.groups in ("offsets", "lengths", "indices"):
            return math.ceil(self.rows / max(self.read, 1) - 1e-9)
        return self.rows

    @functools.cached_property
    def read(self) -> float:
        """Matrices of b that are read, on average."""
        return self.batches * self._more_than(0) if self.routed else self.batches

    def row_tiles(self, size: int) -> float:
        """Tiles of `size` rows, of all matrices together."""
        if not self.routed:
            return self.batches * -(-self.group_rows // size)
        mean = self.rows / self.batches
        most = math.ceil((mean + 6 * math.sqrt(mean) + 1) / size)
        return self.batches * sum(self._more_than(i * size) for i in range(most))

    def _more_than(self, rows: int) -> float:
        """The probability that a matrix has more than `rows` rows: they are Poisson distributed."""
        mean = self.rows / self.batches
        if mean > 100:
            return 0.5 * math.erfc((rows + 0.5 - mean) / math.sqrt(2 * mean))
        terms = (math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(rows + 1))
        return max(1.0 - sum(terms), 0.0)

    @property
    def gated(self) -> bool:
        """Whether the activation halves the columns."""
        return self.activation in GATED


@functools.lru_cache(maxsize=4096)
def choose_config(problem: GemmProblem) -> GemmConfig:
    """The configuration that the model finds fastest."""
    return min(_candidates(problem), key=lambda config: estimate(problem, config))


@functools.lru_cache(maxsize=1024)
def worth_measuring(problem: GemmProblem) -> tuple[GemmConfig, ...]:
    """The configurations that a measurement decides among, from the model's choice on."""
    best = choose_config(problem)
    limit = _NEAR * estimate(problem, best)
    # Many times too many rows cost little by the model where memory is the bound, and gain nothing.
    most_rows = 2 * best.tile_rows
    times = {
        config: estimate(problem, config)
        for config in all_configs(problem)
        if config != best and config.tile_rows <= most_rows
    }
    others = sorted(times, key=lambda config: times[config])
    near = [config for config in others if times[config] <= limit]
    return (best, *near[: _MOST_MEASURED - 1])


def serves(problem: GemmProblem, config: GemmConfig) -> bool:
    """Whether a tile that other sizes were measured with is likely enough for these."""
    return estimate(problem, config) <= _NEAR * estimate(problem, choose_config(problem))


def all_configs(problem: GemmProblem) -> tuple[GemmConfig, ...]:
    """Tiles that a product of these types can have, whatever its sizes are."""
    return _all_configs(replace(problem, rows=1, columns=1, k=1, batches=1, routed=False))


@functools.lru_cache(maxsize=256)
def _all_configs(problem: GemmProblem) -> tuple[GemmConfig, ...]:
    sizes = (replace(problem, rows=rows) for rows in (8, 16, 32, 64, 128, 129))
    return tuple(dict.fromkeys(config for size in sizes for config in _candidates(size)))


def _candidates(problem: GemmProblem) -> Iterator[GemmConfig]:
    """Tiles that the product can have."""
    quantizes_blocks = problem.dtype_out in FLOAT8 and problem.scale == "block"
    for config in _tiles(problem):
        # A tile has whole blocks of 128 columns where the kernel computes their scales.
        columns = config.tile_columns // (2 if problem.gated else 1)
        if not quantizes_blocks or columns % 128 == 0:
            yield config


def _tiles(problem: GemmProblem) -> Iterator[GemmConfig]:
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
    blocks = problem.scale == "block" and problem.groups == "batch" and not gated
    if problem.groups != "indices" and problem.group_rows <= _MAX_TOKENS:
        rows = problem.group_rows
        # One tile has the rows of most groups, or of the average one.
        most = rows + round(2 * math.sqrt(rows)) if problem.routed else rows
        for tile_rows in sorted({_rows_of_tile(rows), _rows_of_tile(most)}):
            if tile_rows > 32 and blocks and problem.dtype_out not in FLOAT8:
                yield from _few(base, rows, problem.columns)
            elif tile_rows == 64 and gated and problem.scale == "block" and base.groups == "batch":
                # Tokens are the tensor cores' rows, as in `_few`.
                few = replace(base, tile_rows=64, tile_columns=256)
                yield from (few, replace(few, cluster_columns=2))
            else:
                yield from _narrow(base, tile_rows, gated)
        if problem.group_rows <= _MAX_TOKENS // 2 or (blocks and problem.dtype_out not in FLOAT8):
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
    many = problem.groups == "indices" or (blocks and problem.group_rows > base.tile_rows)
    if many and not gated and problem.scale == "block" and problem.dtype_out.itemsize == 2:
        wide = replace(base, tile_columns=256, max_stages=_STORING_STAGES)
        yield wide
        if problem.groups == "indices":
            yield replace(wide, tile_columns=192, max_stages=4)
        else:
            yield replace(wide, tile_rows=256, tile_columns=128)


def _few(base: GemmConfig, rows: int, columns: int) -> Iterator[GemmConfig]:
    """Tiles of 33 to 128 tokens with a scale for every block.

    Tokens are the tensor cores' rows, though some may be missing: then a thread multiplies few
    scales, not one for every column.
    """
    for tile_rows, width in ((64, 64), (128, 64), (128, 128)):
        if tile_rows == 128 and rows <= 64:
            continue
        tile = replace(base, tile_rows=tile_rows, tile_columns=width, consumers=tile_rows // 64)
        yield from (tile, replace(tile, splits=2))
        if width == 64:
            yield replace(tile, cluster_columns=2)
    # Tokens are loaded by half as many tiles; more columns would take a second round.
    for splits in (3, 2):
        if rows <= 64 and columns <= 96 // splits * 128:
            yield replace(base, tile_rows=64, consumers=2, splits=splits)


def _narrow(base: GemmConfig, tile_rows: int, gated: bool) -> Iterator[GemmConfig]:
    narrow = replace(base, tile_rows=tile_rows, swap=True)
    for columns, consumers in ((64, 1), (128, 2)):
        # A warpgroup has 64 gate rows and their 64 up rows.
        tile = replace(narrow, tile_columns=columns * (2 if gated else 1), consumers=consumers)
        for shared in (1, 2):
            if shared == 2 and (base.gathers or tile_rows < 16):
                continue
            for splits in (1, 2):
                # Parts of 128 rows by 256 columns have no room in shared memory.
                if splits > 1 and tile_rows * tile.tile_columns > 128 * 128:
                    continue
                if splits == 1 or base.groups == "batch" or base.gathers:
                    yield replace(tile, cluster_columns=shared, splits=splits)


def _rows_of_tile(rows: int) -> int:
    return next((size for size in (8, 16, 32, 64, 128) if rows <= size), 128)


def estimate(problem: GemmProblem, config: GemmConfig) -> float:
    """Microseconds that the model expects."""
    dense = problem.groups == "batch"
    few = dense and problem.group_rows <= _MAX_TOKENS
    if few and problem.scale == "block" and not problem.gated:
        return _estimate_few_blocks(problem, config)
    element = problem.dtype_a.itemsize
    blocks = -(-problem.k * element // 128)
    blocks = -(-blocks // config.splits)
    out_columns = config.tile_columns // (2 if problem.gated else 1)
    columns = problem.columns // (2 if problem.gated else 1)
    column_units = -(-columns // (out_columns * config.cluster_columns))
    cluster = config.cluster_rows * config.cluster_columns * config.splits
    row_units = problem.row_tiles(config.tile_rows * config.cluster_rows)
    units = row_units * column_units
    rounds: float = math.ceil(units / _CLUSTERS[cluster])
    has_thirds = config.tile_columns == 192 and config.scale == "block"
    rest = columns % (out_columns * config.cluster_columns)
    if has_thirds and rest:
        # The last column of tiles comes last, and takes a bit more than a third of the time or two.
        thirds = -(-rest // (64 * config.cluster_columns))
        rounds = math.ceil((units - row_units) / _CLUSTERS[cluster])
        after = units - rounds * _CLUSTERS[cluster]
        rounds += max(0, math.ceil(after / _CLUSTERS[cluster])) * (thirds + 0.5) / 3
    clocks = max(_block_clocks(config, element), _LEAST_CLOCKS)
    clocks = max(clocks, _OUTSIDE_CLOCKS * _rows_outside(problem, config))
    compute = rounds * (blocks * clocks / _CLOCK + _STORE)
    if (config.max_stages == _STORING_STAGES or has_thirds) and (
        dense or problem.group_rows >= _STORING_ROWS
    ):
        compute -= (rounds - 0.7) * _HIDDEN_STORE
    if config.tile_rows == 256:
        compute += rounds * _TALL
    if element == 1 and cluster == 2 and config.tile_rows * config.tile_columns >= 128 * 256:
        compute *= _PAIR
    # What the other CTA of a cluster does not load comes from L2.
    loaded = 128 * (
        config.tile_rows / config.cluster_columns + config.tile_columns / config.cluster_rows
    )
    cache_bytes = _FEW_CACHE_BYTES if few else _CACHE_BYTES
    cache = units * cluster * blocks * loaded / cache_bytes
    weights = problem.read * problem.columns * problem.k * element
    rows = problem.read * problem.group_rows * (problem.k * element + 2 * columns)
    # Few CTAs do not draw what memory could give.
    drawn = 0.0
    if few:
        drawn = rounds * blocks * loaded / _FEW_CTA_BYTES[element]
    elif problem.routed and config.swap:
        drawn = rounds * blocks * loaded / _ROUTED_CTA_BYTES
    parts = sorted((compute, cache, max(drawn, (weights + rows) / _BYTES)))
    overhead = _LAUNCH
    if config.splits > 1:
        overhead += _SPLIT * (rounds if few else 1)
    return overhead + parts[2] + _OVERLAP * (parts[0] + parts[1])


def _estimate_few_blocks(problem: GemmProblem, config: GemmConfig) -> float:
    """The same for few tokens with scales of blocks: fitted to all tiles of products that follow a
    norm, of 7 numbers of tokens by 94 matrices (docs/tuning/gemm_few.md)."""
    blocks = math.ceil(math.ceil(problem.k / 128) / config.splits)
    cluster = config.cluster_columns * config.splits
    columns = config.tile_columns * config.cluster_columns
    units = problem.row_tiles(config.tile_rows) * math.ceil(problem.columns / columns)
    rounds = math.ceil(units / _CLUSTERS[cluster])
    area = config.tile_rows * config.tile_columns
    clocks = area / 32 + _FEW_PROMOTION * area + (280.0 if config.swap else 40.0)
    clocks = max(clocks, _FEW_OUTSIDE_CLOCKS * _rows_outside(problem, config))
    compute = rounds * (blocks * clocks / _CLOCK + _STORE)
    loaded = 128 * (config.tile_rows / config.cluster_columns + config.tile_columns)
    cache = units * cluster * blocks * loaded / _FEW_CACHE_BYTES
    weights = problem.batches * problem.columns * problem.k
    rows = problem.batches * problem.rows * (problem.k + 2 * problem.columns)
    drawn = max(rounds * blocks * _FEW_STAGE, (weights + rows) / _FEW_BYTES)
    parts = sorted((compute, cache, drawn))
    overhead = _LAUNCH + (_SPLIT * rounds if config.splits > 1 else 0.0)
    return overhead + parts[2] + _OVERLAP * (parts[0] + parts[1])


def _block_clocks(config: GemmConfig, element: int) -> float:
    """Clocks of a stage: 128 bytes of k of both operands."""
    products = config.tile_rows * config.tile_columns * (128 // element) * 2
    clocks = products / (4096 if element == 2 else 8192)
    overhead = 80.0
    if element == 1:  # sums are promoted
        area = config.tile_rows * config.tile_columns
        overhead = 40.0 + area / 64 + (240.0 if config.swap else 0.0)
    return clocks + overhead


def _rows_outside(problem: GemmProblem, config: GemmConfig) -> int:
    """Rows that the boxes of a stage have and a does not, where CTAs of a cluster share them."""
    part = config.tile_rows // config.cluster_columns
    if problem.groups != "batch" or not part < problem.rows < config.tile_rows:
        return 0
    return -problem.rows % part
