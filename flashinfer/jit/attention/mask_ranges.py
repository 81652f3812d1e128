"""The module that reads custom masks: ``include/flashinfer/attention/mask_ranges.cuh``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import ModuleConfig
from ..core import JitSpec
from ..registry import register_generator


@dataclass(frozen=True)
class AttentionMaskRangesConfig(ModuleConfig):
    """Nothing selects code: the mask and its lengths are run-time arguments."""

    module: ClassVar[str] = "attention_mask_ranges"


def _configs() -> Iterator[AttentionMaskRangesConfig]:
    yield AttentionMaskRangesConfig()


@register_generator(aot=_configs, presets={"llama-bf16": _configs})
def gen_attention_mask_ranges_module(config: AttentionMaskRangesConfig | None = None) -> JitSpec:
    """The module with ``attention_mask_ranges``: which keys a custom mask shows each query."""
    return JitSpec.from_config(
        config or AttentionMaskRangesConfig(),
        ["attention_mask_ranges.cu", "attention_mask_ranges_jit_binding.cc"],
    )


@functools.cache
def get_attention_mask_ranges_module() -> Any:
    """The loaded module, compiled first if need be."""
    return gen_attention_mask_ranges_module().build_and_load()
