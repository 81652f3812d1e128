"""The module of the planner on the device: ``include/flashinfer/attention/device_plan.cuh``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import ModuleConfig
from ..core import JitSpec
from ..registry import register_generator


@dataclass(frozen=True)
class AttentionDevicePlanConfig(ModuleConfig):
    """Nothing selects code: heads, tiles and options are run-time arguments."""

    module: ClassVar[str] = "attention_device_plan"


def _configs() -> Iterator[AttentionDevicePlanConfig]:
    yield AttentionDevicePlanConfig()


@register_generator(aot=_configs, presets={"llama-bf16": _configs})
def gen_attention_device_plan_module(config: AttentionDevicePlanConfig | None = None) -> JitSpec:
    """The module with ``attention_device_plan``, which plans decode from lengths on the GPU."""
    return JitSpec.from_config(
        config or AttentionDevicePlanConfig(),
        ["attention_device_plan.cu", "attention_device_plan_jit_binding.cc"],
    )


@functools.cache
def get_attention_device_plan_module() -> Any:
    """The loaded module, compiled first if need be."""
    return gen_attention_device_plan_module().build_and_load()
