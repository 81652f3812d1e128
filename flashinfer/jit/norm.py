"""Modules of csrc/norm.cu: RMS norm and layer norm, with a residual sum or an 8-bit output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, FLOAT8, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator


@dataclass(frozen=True)
class NormConfig(ModuleConfig):
    """Selects code. Sizes, strides and Gemma's weight offset are run-time arguments."""

    module: ClassVar[str] = "norm"

    dtype: torch.dtype
    out_dtype: torch.dtype
    subtract_mean: bool = False
    add_residual: bool = False

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype, FLOAT)
        check_dtype("out", self.out_dtype, (self.dtype, *FLOAT8))


def _aot_configs() -> Iterator[NormConfig]:
    for dtype in (torch.float16, torch.bfloat16):
        for out_dtype in (dtype, torch.float8_e4m3fn):
            for add_residual in (False, True):
                yield NormConfig(dtype, out_dtype, add_residual=add_residual)
            yield NormConfig(dtype, out_dtype, subtract_mean=True)


def _llama_configs() -> Iterator[NormConfig]:
    for add_residual in (False, True):
        yield NormConfig(torch.bfloat16, torch.bfloat16, add_residual=add_residual)


def _fp8_configs() -> Iterator[NormConfig]:
    for add_residual in (False, True):
        yield NormConfig(torch.bfloat16, torch.float8_e4m3fn, add_residual=add_residual)


_presets = {"llama-bf16": _llama_configs, "gemma": _llama_configs, "fp8": _fp8_configs}


@register_generator(aot=_aot_configs, presets=_presets)
def gen_norm_module(config: NormConfig | None = None) -> JitSpec:
    """The module with ``norm`` and, for an RMS norm, ``gemma_norm``; by default of bfloat16."""
    config = config or NormConfig(torch.bfloat16, torch.bfloat16)
    return JitSpec.from_config(config, ["norm.cu", "norm_jit_binding.cc"])
