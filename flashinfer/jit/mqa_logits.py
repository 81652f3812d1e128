"""Modules of csrc/mqa_*.cu: the scores by which sparse attention chooses tokens, on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .gemm import TARGET_FLAGS
from .registry import register_generator

HEADS = (8, 16, 32, 64, 128)
MAX_COLUMNS = 128
"""Heads times queries of one product."""


@dataclass(frozen=True)
class MqaLogitsConfig(ModuleConfig):
    """The dtype of the result, heads, queries of a product, and where keys lie select code."""

    module: ClassVar[str] = "mqa_logits"
    supported_major_versions: ClassVar[tuple[int, ...]] = (9,)

    dtype_out: torch.dtype
    heads: int
    queries: int
    paged: bool

    def __post_init__(self) -> None:
        check_dtype("out", self.dtype_out, FLOAT)
        if self.heads not in HEADS:
            raise ValueError(f"`q` must have 8, 16, 32, 64 or 128 heads, got {self.heads}")
        if not 1 <= self.queries <= MAX_COLUMNS // self.heads:
            raise ValueError(
                f"`queries` must be from 1 to {MAX_COLUMNS // self.heads} for {self.heads} heads, "
                f"got {self.queries}"
            )


@dataclass(frozen=True)
class MqaScheduleConfig(ModuleConfig):
    """One module serves all calls."""

    module: ClassVar[str] = "mqa_schedule"


def _logits_cases() -> Iterator[MqaLogitsConfig]:
    for queries in (1, 2):
        yield MqaLogitsConfig(torch.float32, 64, queries, True)
    yield MqaLogitsConfig(torch.float32, 64, 2, False)


def _schedule_cases() -> Iterator[MqaScheduleConfig]:
    yield MqaScheduleConfig()


@register_generator(aot=_logits_cases, presets={"mla": _logits_cases})
def gen_mqa_logits_module(config: MqaLogitsConfig) -> JitSpec:
    """The module with ``mqa_logits`` for one configuration."""
    sources = ["mqa_logits.cu", "mqa_logits_jit_binding.cc"]
    return JitSpec.from_config(config, sources, extra_cuda_cflags=list(TARGET_FLAGS))


@register_generator(aot=_schedule_cases, presets={"mla": _schedule_cases})
def gen_mqa_schedule_module(config: MqaScheduleConfig | None = None) -> JitSpec:
    """The module with ``mqa_schedule``."""
    sources = ["mqa_schedule.cu", "mqa_schedule_jit_binding.cc"]
    return JitSpec.from_config(config or MqaScheduleConfig(), sources)
