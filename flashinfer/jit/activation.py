"""Modules of csrc/activation.cu: gated activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class ActAndMulConfig(ModuleConfig):
    """Selects code: the activation and the dtype of input and output."""

    module: ClassVar[str] = "act_and_mul"

    activation: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"`act_func_name` must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}"
            )
        check_dtype("input", self.dtype, FLOAT)


def _aot_configs() -> Iterator[tuple[str, torch.dtype]]:
    for activation in ACTIVATIONS:
        for dtype in (torch.float16, torch.bfloat16):
            yield activation, dtype


def _llama_configs() -> Iterator[tuple[str, torch.dtype]]:
    yield "silu", torch.bfloat16


def _gemma_configs() -> Iterator[tuple[str, torch.dtype]]:
    yield "gelu_tanh", torch.bfloat16


_presets = {"llama-bf16": _llama_configs, "gemma": _gemma_configs}


@register_generator(aot=_aot_configs, presets=_presets)
def gen_act_and_mul_module(act_func_name: str, dtype: torch.dtype = torch.bfloat16) -> JitSpec:
    """The module with ``act_and_mul`` for one activation and dtype."""
    config = ActAndMulConfig(act_func_name, dtype)
    return JitSpec.from_config(config, ["activation.cu", "activation_jit_binding.cc"])
