"""The module of csrc/page.cu: appending to paged caches, and the index tensors that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator


@dataclass(frozen=True)
class PageConfig(ModuleConfig):
    """Nothing selects code: rows are moved as bytes, whatever their element type."""

    module: ClassVar[str] = "page"


def _configs() -> Iterator[PageConfig]:
    yield PageConfig()


@register_generator(
    aot=_configs, presets={"llama-bf16": _configs, "gemma": _configs, "mla": _configs}
)
def gen_page_module(config: PageConfig | None = None) -> JitSpec:
    """The module with the appends, ``get_batch_indices_positions`` and ``get_seq_lens``."""
    return JitSpec.from_config(config or PageConfig(), ["page.cu", "page_jit_binding.cc"])
