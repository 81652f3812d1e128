"""The module of csrc/concat_ops.cu: concatenation of K's parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator


@dataclass(frozen=True)
class ConcatMlaConfig(ModuleConfig):
    """Nothing selects code: rows are moved as bytes, whatever their element type."""

    module: ClassVar[str] = "concat_mla"


def _configs() -> Iterator[ConcatMlaConfig]:
    yield ConcatMlaConfig()


@register_generator(aot=_configs, presets={"mla": _configs})
def gen_concat_mla_module(config: ConcatMlaConfig | None = None) -> JitSpec:
    """The module with ``concat_mla_k``."""
    return JitSpec.from_config(
        config or ConcatMlaConfig(), ["concat_ops.cu", "concat_ops_jit_binding.cc"]
    )
