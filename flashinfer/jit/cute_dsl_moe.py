"""Modules of flashinfer/cute_dsl/moe_*_kernel.py: a mixture of experts in 8 bits, in CuTe-DSL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, check_dtype
from . import cute_dsl
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

_ROWS = (torch.float16, torch.bfloat16)
_CODES = torch.float8_e4m3fn
_MAX_TOP_K = 32
# Rows, columns, whether weights are the left operand, CTAs that share weights: as in the fields.
GEMM_TILES = (
    *((rows, 128, True, 1) for rows in (8, 16, 32, 64)),
    (128, 256, False, 1),
    (128, 256, False, 2),
)


def gemm_tile_for(rows: int) -> int:
    """Which of `GEMM_TILES` serves groups of typically so many rows: the first that holds them."""
    last = len(GEMM_TILES) - 1
    return next((i for i, tile in enumerate(GEMM_TILES) if rows <= tile[0]), last)


@dataclass(frozen=True)
class CuteDslMoeActivationConfig(ModuleConfig):
    """The type of the rows selects code."""

    module: ClassVar[str] = "cute_dsl_moe_activation"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (9,)

    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype, _ROWS)


@dataclass(frozen=True)
class CuteDslMoeFinalizeConfig(ModuleConfig):
    """The types of the experts' rows and of the result, and the experts of a token, select code."""

    module: ClassVar[str] = "cute_dsl_moe_finalize"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (9,)

    dtype: torch.dtype
    dtype_out: torch.dtype
    top_k: int

    def __post_init__(self) -> None:
        check_dtype("rows", self.dtype, _ROWS)
        check_dtype("output", self.dtype_out, FLOAT)
        if not 1 <= self.top_k <= _MAX_TOP_K:
            raise ValueError(
                f"`entry_row` must have 1 to {_MAX_TOP_K} columns for kernels in CuTe-DSL, got "
                f"{self.top_k}"
            )


@dataclass(frozen=True)
class CuteDslGroupedGemmConfig(ModuleConfig):
    """The type of the result and the tile select code; other fields tell gemm_jit_binding.cc what
    it is.

    Attributes
    ----------
    tile_rows, tile_columns : int
        Size of a tile of the result.
    swap : bool
        Whether weights are the tensor cores' left operand; for tiles of few rows.
    cluster_rows : int
        CTAs that share weights.
    """

    module: ClassVar[str] = "cute_dsl_grouped_gemm"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (9,)

    dtype_out: torch.dtype
    tile_rows: int = 128
    tile_columns: int = 256
    swap: bool = False
    cluster_rows: int = 1
    dtype_a: torch.dtype = _CODES
    dtype_b: torch.dtype = _CODES
    scale: str = "block"
    groups: str = "masked"
    activation: str = "identity"
    gathers: bool = False

    def __post_init__(self) -> None:
        check_dtype("out", self.dtype_out, FLOAT)
        check_dtype("a", self.dtype_a, (_CODES,))
        check_dtype("b", self.dtype_b, (_CODES,))
        fixed = self.scale, self.groups, self.activation, self.gathers
        if fixed != ("block", "masked", "identity", False):
            raise ValueError(f"there is one kernel: of scales of blocks, masked; got {fixed}")
        tile = self.tile_rows, self.tile_columns, self.swap, self.cluster_rows
        if tile not in GEMM_TILES:
            raise ValueError(f"there is no kernel with the tile {tile}, but with {GEMM_TILES}")


def _activation_cases() -> Iterator[CuteDslMoeActivationConfig]:
    yield CuteDslMoeActivationConfig(torch.bfloat16)


def _finalize_cases() -> Iterator[CuteDslMoeFinalizeConfig]:
    for top_k in (2, 4, 6, 8):
        yield CuteDslMoeFinalizeConfig(torch.bfloat16, torch.bfloat16, top_k)


def _gemm_cases() -> Iterator[CuteDslGroupedGemmConfig]:
    for tile in GEMM_TILES:
        yield CuteDslGroupedGemmConfig(torch.bfloat16, *tile)


def _spec(config: ModuleConfig, kernel: str, *sources: str) -> JitSpec:
    return JitSpec.from_config(config, [*sources, cute_dsl.KERNELS / kernel])


@register_generator(
    aot=_activation_cases, presets={"cute-dsl": _activation_cases}, compiler="cute-dsl"
)
def gen_cute_dsl_moe_activation_module(config: CuteDslMoeActivationConfig) -> JitSpec:
    """The module with ``moe_activation`` for one configuration."""
    return _spec(config, "moe_activation_kernel.py", "cute_dsl_moe_activation_jit_binding.cc")


@register_generator(aot=_finalize_cases, presets={"cute-dsl": _finalize_cases}, compiler="cute-dsl")
def gen_cute_dsl_moe_finalize_module(config: CuteDslMoeFinalizeConfig) -> JitSpec:
    """The module with ``moe_combine`` for one configuration."""
    sources = "moe_combine_jit_binding.cc", "cute_dsl_moe_finalize.cc"
    return _spec(config, "moe_finalize_kernel.py", *sources)


@register_generator(aot=_gemm_cases, presets={"cute-dsl": _gemm_cases}, compiler="cute-dsl")
def gen_cute_dsl_grouped_gemm_module(config: CuteDslGroupedGemmConfig) -> JitSpec:
    """The module with ``gemm`` for one configuration."""
    sources = "gemm_jit_binding.cc", "cute_dsl_gemm.cc"
    return _spec(config, "moe_grouped_gemm_kernel.py", *sources)
