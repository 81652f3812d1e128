"""Modules of csrc/one_row*.cu: products of one row with weights ``[k, n]``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, FLOAT8, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

COLUMNS = (64, 128)


@dataclass(frozen=True)
class OneRowConfig(ModuleConfig):
    """Selects code: the type, the columns of a CTA, and whether the row is a norm's."""

    module: ClassVar[str] = "one_row"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (9,)

    dtype: torch.dtype
    columns: int
    norm: bool = False

    def __post_init__(self) -> None:
        check_dtype("a", self.dtype, (torch.float16, torch.bfloat16))
        if self.columns not in COLUMNS:
            raise ValueError(f"`columns` must be one of {COLUMNS}, got {self.columns}")


def _configs() -> Iterator[OneRowConfig]:
    for columns in COLUMNS:
        for norm in (False, True):
            yield OneRowConfig(torch.bfloat16, columns, norm)


@register_generator(aot=_configs, presets={"llama-bf16": _configs})
def gen_one_row_module(config: OneRowConfig) -> JitSpec:
    """The module with ``one_row``."""
    return JitSpec.from_config(config, ["one_row.cu", "one_row_jit_binding.cc"])


@dataclass(frozen=True)
class OneRowHeadsConfig(ModuleConfig):
    """Selects code: types of the row, of the paged cache and of cosines, which pairs turn."""

    module: ClassVar[str] = "one_row_heads"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (9,)

    dtype: torch.dtype
    out_dtype: torch.dtype
    cache_dtype: torch.dtype
    interleave: bool
    head_dim: int

    def __post_init__(self) -> None:
        check_dtype("a", self.dtype, (torch.float16, torch.bfloat16))
        if self.out_dtype != self.dtype:
            check_dtype("paged_kv_cache", self.out_dtype, FLOAT8)
        check_dtype("cos_sin_cache", self.cache_dtype, FLOAT)
        if self.head_dim not in COLUMNS:
            raise ValueError(f"`head_dim` must be one of {COLUMNS}, got {self.head_dim}")


def _heads_configs() -> Iterator[OneRowHeadsConfig]:
    for cached in (torch.bfloat16, torch.float8_e4m3fn):
        yield OneRowHeadsConfig(torch.bfloat16, cached, torch.float32, False, 128)


@register_generator(aot=_heads_configs, presets={"llama-bf16": _heads_configs})
def gen_one_row_heads_module(config: OneRowHeadsConfig) -> JitSpec:
    """The module with ``one_row_heads``."""
    return JitSpec.from_config(config, ["one_row_heads.cu", "one_row_heads_jit_binding.cc"])


@dataclass(frozen=True)
class OneRowRouteConfig(ModuleConfig):
    """Selects code: the type, and the most experts."""

    module: ClassVar[str] = "one_row_route"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (9,)

    dtype: torch.dtype
    columns: int

    def __post_init__(self) -> None:
        check_dtype("a", self.dtype, (torch.float16, torch.bfloat16))
        if self.columns not in COLUMNS:
            raise ValueError(f"`columns` must be one of {COLUMNS}, got {self.columns}")


def _route_configs() -> Iterator[OneRowRouteConfig]:
    for columns in COLUMNS:
        yield OneRowRouteConfig(torch.bfloat16, columns)


@register_generator(aot=_route_configs, presets={"qwen3-moe": _route_configs})
def gen_one_row_route_module(config: OneRowRouteConfig) -> JitSpec:
    """The module with ``one_row_route``."""
    return JitSpec.from_config(config, ["one_row_route.cu", "one_row_route_jit_binding.cc"])
