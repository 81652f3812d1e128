"""The module that copies keys out of pages: ``include/flashinfer/attention/gather.cuh``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import ModuleConfig
from ..core import JitSpec
from ..registry import register_generator


@dataclass(frozen=True)
class AttentionGatherConfig(ModuleConfig):
    """Nothing selects code: element types and sizes are run-time arguments."""

    module: ClassVar[str] = "attention_gather"


def _configs() -> Iterator[AttentionGatherConfig]:
    yield AttentionGatherConfig()


@register_generator(aot=_configs, presets={"llama-bf16": _configs, "fp8": _configs})
def gen_attention_gather_module(config: AttentionGatherConfig | None = None) -> JitSpec:
    """The module with ``attention_gather``, which copies keys and values out of pages."""
    return JitSpec.from_config(
        config or AttentionGatherConfig(),
        ["attention_gather.cu", "attention_gather_jit_binding.cc"],
    )


@functools.cache
def get_attention_gather_module() -> Any:
    """The loaded module, compiled first if need be."""
    return gen_attention_gather_module().build_and_load()
