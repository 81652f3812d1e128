"""Modules of csrc/cascade.cu: merges of attention states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator


@dataclass(frozen=True)
class CascadeConfig(ModuleConfig):
    """Selects code. `pair`: two states in tensors of their own, else any number in one."""

    module: ClassVar[str] = "cascade"

    dtype: torch.dtype
    pair: bool

    def __post_init__(self) -> None:
        check_dtype("v", self.dtype, FLOAT)


def _aot_configs() -> Iterator[CascadeConfig]:
    for dtype in (torch.float16, torch.bfloat16):
        for pair in (False, True):
            yield CascadeConfig(dtype, pair)


def _llama_configs() -> Iterator[CascadeConfig]:
    for pair in (False, True):
        yield CascadeConfig(torch.bfloat16, pair)


@register_generator(aot=_aot_configs, presets={"llama-bf16": _llama_configs})
def gen_cascade_module(config: CascadeConfig) -> JitSpec:
    """The module with ``merge_state`` and ``merge_state_in_place``, or with ``merge_states``."""
    return JitSpec.from_config(config, ["cascade.cu", "cascade_jit_binding.cc"])
