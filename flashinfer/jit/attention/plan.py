"""The module of the attention planner: ``include/flashinfer/scheduler/attention_plan.h``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import ModuleConfig
from ..core import JitSpec
from ..registry import register_generator


@dataclass(frozen=True)
class AttentionPlanConfig(ModuleConfig):
    """Nothing selects code: the planner is the same for every kernel."""

    module: ClassVar[str] = "attention_plan"


def _configs() -> Iterator[AttentionPlanConfig]:
    yield AttentionPlanConfig()


@register_generator(aot=_configs, presets={"llama-bf16": _configs, "gemma": _configs})
def gen_attention_plan_module(config: AttentionPlanConfig | None = None) -> JitSpec:
    """The module with the ``attention_plan`` functions; it has no device code."""
    return JitSpec.from_config(config or AttentionPlanConfig(), ["attention_plan_jit_binding.cc"])


@functools.cache
def get_attention_plan_module() -> Any:
    """The loaded module, compiled first if need be."""
    return gen_attention_plan_module().build_and_load()


def is_planner_built() -> bool:
    """Whether the planner is loaded or can be without a compiler."""
    loaded = get_attention_plan_module.cache_info().currsize > 0
    return loaded or gen_attention_plan_module().is_built()
