"""Modules of communication inside a host: csrc/all_reduce.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

MAX_RANKS = 16
INPUTS = ("tensor", "moe_reduction", "moe_finalize")
OUTPUTS = (
    "sum",
    "norm",
    "static_e4m3",
    "row_e4m3",
    "nvfp4_linear",
    "nvfp4_128x4",
    "nvfp4_8x4",
)


def check_ranks(world_size: int) -> None:
    """Refuse a number of ranks for which no module can be made."""
    if not 2 <= world_size <= MAX_RANKS:
        raise ValueError(f"`world_size` must be from 2 to {MAX_RANKS}, got {world_size}")


@dataclass(frozen=True)
class AllReduceConfig(ModuleConfig):
    """Selects code: dtype, ranks, where a row comes from, and what is done with its sum."""

    module: ClassVar[str] = "all_reduce"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (8, 9, 10, 11, 12)

    dtype: torch.dtype
    world_size: int
    input: str = "tensor"
    output: str = "sum"

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype, FLOAT)
        check_ranks(self.world_size)
        if self.input not in INPUTS:
            raise ValueError(f"`input` must be one of {', '.join(INPUTS)}, got {self.input!r}")
        if self.output not in OUTPUTS:
            raise ValueError(f"`output` must be one of {', '.join(OUTPUTS)}, got {self.output!r}")
        if self.input != "tensor" and self.output == "sum":
            raise ValueError(f"`input` {self.input!r} needs an output with a norm")


def _aot_configs() -> Iterator[AllReduceConfig]:
    for dtype in (torch.float16, torch.bfloat16):
        for world_size in (2, 4, 8):
            for output in ("sum", "norm", "static_e4m3"):
                yield AllReduceConfig(dtype, world_size, output=output)


def _tensor_parallel_configs() -> Iterator[AllReduceConfig]:
    for world_size in (2, 4, 8):
        for output in ("sum", "norm"):
            yield AllReduceConfig(torch.bfloat16, world_size, output=output)


@register_generator(aot=_aot_configs, presets={"tensor-parallel": _tensor_parallel_configs})
def gen_all_reduce_module(config: AllReduceConfig | None = None) -> JitSpec:
    """The module with ``all_reduce``; by default of two ranks with bfloat16."""
    config = config or AllReduceConfig(torch.bfloat16, 2)
    return JitSpec.from_config(config, ["all_reduce.cu", "all_reduce_jit_binding.cc"])


@dataclass(frozen=True)
class ExchangeConfig(ModuleConfig):
    """Selects code. `adds`: blocks are summed, as elements of `dtype`, not placed."""

    module: ClassVar[str] = "exchange"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (8, 9, 10, 11, 12)

    dtype: torch.dtype
    world_size: int
    adds: bool = False

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype, FLOAT)
        check_ranks(self.world_size)


def _exchange_configs() -> Iterator[ExchangeConfig]:
    for world_size in (2, 4, 8):
        for adds in (False, True):
            yield ExchangeConfig(torch.bfloat16, world_size, adds)


@register_generator(aot=_exchange_configs, presets={"tensor-parallel": _exchange_configs})
def gen_exchange_module(config: ExchangeConfig | None = None) -> JitSpec:
    """The module with ``exchange``; by default of two ranks with bfloat16."""
    config = config or ExchangeConfig(torch.bfloat16, 2)
    return JitSpec.from_config(config, ["exchange.cu", "exchange_jit_binding.cc"])
