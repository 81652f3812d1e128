"""Modules of csrc/fused_rmsnorm.cu: RMS norm, then SiLU or quantisation in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

OUTPUTS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "e4m3_blocks")


@dataclass(frozen=True)
class FusedRmsnormConfig(ModuleConfig):
    """Selects code: input dtype, form of the output, residual before, SiLU after."""

    module: ClassVar[str] = "fused_rmsnorm"

    dtype: torch.dtype
    output: str
    add_residual: bool = False
    silu: bool = False

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype, FLOAT)
        if self.output not in OUTPUTS:
            raise ValueError(f"`output` must be one of {', '.join(OUTPUTS)}, got {self.output!r}")


def _fp8_configs(dtype: torch.dtype = torch.bfloat16) -> Iterator[FusedRmsnormConfig]:
    for add_residual in (False, True):
        yield FusedRmsnormConfig(dtype, "e4m3_blocks", add_residual=add_residual)


def _video_configs() -> Iterator[FusedRmsnormConfig]:
    for output in ("bfloat16", "float8_e4m3fn"):
        yield FusedRmsnormConfig(torch.bfloat16, output, silu=True)


def _aot_configs() -> Iterator[FusedRmsnormConfig]:
    for dtype in (torch.float16, torch.bfloat16):
        yield from _fp8_configs(dtype)
    yield from _video_configs()


@register_generator(aot=_aot_configs, presets={"fp8": _fp8_configs, "video": _video_configs})
def gen_fused_rmsnorm_module(config: FusedRmsnormConfig) -> JitSpec:
    """The module with ``fused_rmsnorm`` for one configuration."""
    sources = ["fused_rmsnorm.cu", "fused_rmsnorm_jit_binding.cc"]
    return JitSpec.from_config(config, sources)
