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


@dataclass(frozen=True)
class ExpertDispatchConfig(ModuleConfig):
    """Selects code: the number of ranks."""

    module: ClassVar[str] = "expert_dispatch"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (8, 9, 10, 11, 12)

    world_size: int

    def __post_init__(self) -> None:
        check_ranks(self.world_size)


def _expert_dispatch_configs() -> Iterator[ExpertDispatchConfig]:
    for world_size in (2, 4, 8):
        yield ExpertDispatchConfig(world_size)


@register_generator(
    aot=_expert_dispatch_configs, presets={"tensor-parallel": _expert_dispatch_configs}
)
def gen_expert_dispatch_module(config: ExpertDispatchConfig | None = None) -> JitSpec:
    """The module with ``expert_dispatch`` and ``expert_sanitize``; by default of two ranks."""
    config = config or ExpertDispatchConfig(2)
    return JitSpec.from_config(config, ["expert_dispatch.cu", "expert_dispatch_jit_binding.cc"])


EXPERT_OUTPUTS = (*FLOAT, torch.float8_e4m3fn)


@dataclass(frozen=True)
class ExpertCombineConfig(ModuleConfig):
    """Selects code. `dtype_stored`: of outputs while they cross the link."""

    module: ClassVar[str] = "expert_combine"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (8, 9, 10, 11, 12)

    dtype: torch.dtype
    dtype_stored: torch.dtype
    dtype_out: torch.dtype
    world_size: int

    def __post_init__(self) -> None:
        check_dtype("payload", self.dtype, EXPERT_OUTPUTS)
        check_dtype("output_dtype", self.dtype_out, EXPERT_OUTPUTS)
        if self.dtype_stored not in (self.dtype, torch.float8_e4m3fn):
            raise ValueError(
                f"`payload` must be stored as {self.dtype} or float8_e4m3fn, got "
                f"{self.dtype_stored}"
            )
        check_ranks(self.world_size)


def _expert_combine_configs() -> Iterator[ExpertCombineConfig]:
    for world_size in (2, 4, 8):
        yield ExpertCombineConfig(torch.bfloat16, torch.bfloat16, torch.bfloat16, world_size)


@register_generator(
    aot=_expert_combine_configs, presets={"tensor-parallel": _expert_combine_configs}
)
def gen_expert_combine_module(config: ExpertCombineConfig | None = None) -> JitSpec:
    """The module with ``expert_combine``; by default of two ranks with bfloat16."""
    bf16 = torch.bfloat16
    config = config or ExpertCombineConfig(bf16, bf16, bf16, 2)
    return JitSpec.from_config(config, ["expert_combine.cu", "expert_combine_jit_binding.cc"])


SCALE_GROUPS = (32, 64, 128, 256, 512)


@dataclass(frozen=True)
class QuantizedAllReduceConfig(ModuleConfig):
    """Selects code. `group_size`: elements that share a scale."""

    module: ClassVar[str] = "quantized_all_reduce"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (8, 9, 10, 11, 12)

    dtype: torch.dtype
    world_size: int
    group_size: int = 128

    def __post_init__(self) -> None:
        check_dtype("inp", self.dtype, FLOAT)
        check_ranks(self.world_size)
        if self.group_size not in SCALE_GROUPS:
            raise ValueError(f"`scale_group` must be one of {SCALE_GROUPS}, got {self.group_size}")


def _quantized_configs() -> Iterator[QuantizedAllReduceConfig]:
    for world_size in (2, 4, 8):
        yield QuantizedAllReduceConfig(torch.bfloat16, world_size)


@register_generator(aot=_quantized_configs, presets={"tensor-parallel": _quantized_configs})
def gen_quantized_all_reduce_module(config: QuantizedAllReduceConfig | None = None) -> JitSpec:
    """The module with ``quantized_all_reduce``; by default of two ranks with bfloat16."""
    config = config or QuantizedAllReduceConfig(torch.bfloat16, 2)
    sources = ["quantized_all_reduce.cu", "quantized_all_reduce_jit_binding.cc"]
    return JitSpec.from_config(config, sources)


def gen_trtllm_comm_module() -> JitSpec:
    """FlashInfer's name of the all-reduce: `gen_all_reduce_module`, of two ranks."""
    return gen_all_reduce_module()


def gen_moe_alltoall_module(target: str = "legacy") -> JitSpec:
    """FlashInfer's name of the experts' all-to-all: `gen_expert_dispatch_module`, of two ranks."""
    if target != "legacy":
        raise ValueError(f"`target` must be 'legacy', got {target!r}")
    return gen_expert_dispatch_module()
