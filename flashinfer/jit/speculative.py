"""Module of csrc/speculative.cu: chain speculative sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator


@dataclass(frozen=True)
class SpeculativeConfig(ModuleConfig):
    """There is one: probabilities are float32."""

    module: ClassVar[str] = "speculative"


def _aot_configs() -> Iterator[SpeculativeConfig]:
    yield SpeculativeConfig()


@register_generator(aot=_aot_configs, presets={"speculative": _aot_configs})
def gen_speculative_module(config: SpeculativeConfig) -> JitSpec:
    """The module with ``chain_speculative``."""
    return JitSpec.from_config(config, ["speculative.cu", "speculative_jit_binding.cc"])
