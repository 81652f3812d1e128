"""Modules of csrc/moe_*.cu: what stands around the products of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

_ROWS = (torch.float16, torch.bfloat16)
MOE_SCORES = ("softmax", "sigmoid")
EXPERTS_PER_LANE = (1, 2, 4, 8, 16, 32)
"""A warp routes a token; at most 1024 experts."""


@dataclass(frozen=True)
class MoeRouteConfig(ModuleConfig):
    """The logits' dtype, how they become scores, and the experts of a lane select code."""

    module: ClassVar[str] = "moe_route"

    dtype: torch.dtype
    score: str
    experts_per_lane: int

    def __post_init__(self) -> None:
        check_dtype("scores", self.dtype, FLOAT)
        if self.score not in MOE_SCORES:
            raise ValueError(f"`score` must be one of {', '.join(MOE_SCORES)}, got {self.score!r}")
        if self.experts_per_lane not in EXPERTS_PER_LANE:
            raise ValueError(
                f"`experts_per_lane` must be one of {EXPERTS_PER_LANE}, got "
                f"{self.experts_per_lane!r}"
            )


@dataclass(frozen=True)
class MoeHashConfig(ModuleConfig):
    """The types of the logits, of the tokens' ids and of the table select code."""

    module: ClassVar[str] = "moe_hash"

    dtype: torch.dtype
    ids: str
    table: str

    def __post_init__(self) -> None:
        check_dtype("router_logits", self.dtype, FLOAT)
        for name, value in (("input_ids", self.ids), ("tid2eid", self.table)):
            if value not in ("int32", "int64"):
                raise ValueError(f"`{name}` must be int32 or int64, got {value!r}")


@dataclass(frozen=True)
class MoeMapConfig(ModuleConfig):
    """The type of the experts' numbers selects code."""

    module: ClassVar[str] = "moe_map"

    index: str

    def __post_init__(self) -> None:
        if self.index not in ("int32", "int64"):
            raise ValueError(f"`index` must be int32 or int64, got {self.index!r}")


@dataclass(frozen=True)
class MoeCombineConfig(ModuleConfig):
    """The dtypes of the experts' rows and of the result select code."""

    module: ClassVar[str] = "moe_combine"

    dtype: torch.dtype
    dtype_out: torch.dtype

    def __post_init__(self) -> None:
        check_dtype("rows", self.dtype, _ROWS)
        check_dtype("output", self.dtype_out, FLOAT)


@dataclass(frozen=True)
class MoeTokenConfig(ModuleConfig):
    """The dtype of token and weights, and the type of the experts' numbers select code."""

    module: ClassVar[str] = "moe_token"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (9,)

    dtype: torch.dtype
    index: str

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype, _ROWS)
        if self.index not in ("int32", "int64"):
            raise ValueError(f"`index` must be int32 or int64, got {self.index!r}")


def _route_cases() -> Iterator[MoeRouteConfig]:
    for experts_per_lane in (4, 8):  # 128 and 256 experts
        yield MoeRouteConfig(torch.float32, "softmax", experts_per_lane)
        yield MoeRouteConfig(torch.float32, "sigmoid", experts_per_lane)


def _hash_cases() -> Iterator[MoeHashConfig]:
    yield MoeHashConfig(torch.float32, "int64", "int32")


def _map_cases() -> Iterator[MoeMapConfig]:
    yield MoeMapConfig("int32")
    yield MoeMapConfig("int64")


def _combine_cases() -> Iterator[MoeCombineConfig]:
    for dtype in _ROWS:
        yield MoeCombineConfig(dtype, dtype)


def _token_cases() -> Iterator[MoeTokenConfig]:
    yield MoeTokenConfig(torch.bfloat16, "int32")


def _deepseek_route_cases() -> Iterator[MoeRouteConfig]:
    yield MoeRouteConfig(torch.float32, "sigmoid", 8)


_MIXTURES = ("moe", "qwen3-moe", "deepseek", "gpt-oss")
"""Presets that have the launches around the products."""


@register_generator(
    aot=_route_cases, presets={"moe": _route_cases, "deepseek": _deepseek_route_cases}
)
def gen_moe_route_module(config: MoeRouteConfig) -> JitSpec:
    """The module with ``moe_route`` for one configuration."""
    return JitSpec.from_config(config, ["moe_route.cu", "moe_route_jit_binding.cc"])


@register_generator(aot=_hash_cases, presets={"moe": _hash_cases})
def gen_moe_hash_module(config: MoeHashConfig) -> JitSpec:
    """The module with ``moe_hash`` for one configuration."""
    return JitSpec.from_config(config, ["moe_hash.cu", "moe_hash_jit_binding.cc"])


@register_generator(aot=_map_cases, presets=dict.fromkeys(_MIXTURES, _map_cases))
def gen_moe_map_module(config: MoeMapConfig) -> JitSpec:
    """The module with ``moe_map`` for one configuration."""
    return JitSpec.from_config(config, ["moe_map.cu", "moe_map_jit_binding.cc"])


@register_generator(aot=_combine_cases, presets=dict.fromkeys(_MIXTURES, _combine_cases))
def gen_moe_combine_module(config: MoeCombineConfig) -> JitSpec:
    """The module with ``moe_combine`` for one configuration."""
    return JitSpec.from_config(config, ["moe_combine.cu", "moe_combine_jit_binding.cc"])


@register_generator(aot=_token_cases, presets=dict.fromkeys(("moe", "qwen3-moe"), _token_cases))
def gen_moe_token_module(config: MoeTokenConfig) -> JitSpec:
    """The module with ``moe_token`` for one configuration."""
    return JitSpec.from_config(config, ["moe_token.cu", "moe_token_jit_binding.cc"])
