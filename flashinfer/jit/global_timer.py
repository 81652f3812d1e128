"""The module that reads the GPU's clock: ``include/flashinfer/timing/global_timer.cuh``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator


@dataclass(frozen=True)
class GlobalTimerConfig(ModuleConfig):
    """Nothing selects code."""

    module: ClassVar[str] = "global_timer"


def _configs() -> Iterator[GlobalTimerConfig]:
    yield GlobalTimerConfig()


@register_generator(aot=_configs, presets={"timing": _configs})
def gen_global_timer_module(config: GlobalTimerConfig | None = None) -> JitSpec:
    """The module with ``global_timer``, which writes the time at which a stream reaches it."""
    return JitSpec.from_config(
        config or GlobalTimerConfig(), ["global_timer.cu", "global_timer_jit_binding.cc"]
    )


@functools.cache
def get_global_timer() -> Callable[[torch.Tensor], None]:
    """The loaded function, compiled first if need be."""
    function: Callable[[torch.Tensor], None] = (
        gen_global_timer_module().build_and_load().global_timer
    )
    return function
