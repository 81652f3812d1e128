"""Modules of csrc/topk.cu: the k largest elements of rows, and index transforms."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator


class TopKOutput(enum.Enum):
    """Results for the chosen elements; the enumerators of ``TopKOutput`` in C++."""

    VALUES = "kValues"
    PAGE_TABLE = "kPageTable"
    RAGGED = "kRagged"


@dataclass(frozen=True)
class TopKConfig(ModuleConfig):
    """What selects code; k, sizes and strides are run-time arguments."""

    module: ClassVar[str] = "topk"

    dtype: torch.dtype
    output: TopKOutput

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype, FLOAT)


def _aot_configs() -> Iterator[TopKConfig]:
    for output in TopKOutput:
        for dtype in FLOAT:
            yield TopKConfig(dtype, output)


def _llama_configs() -> Iterator[TopKConfig]:
    for dtype in (torch.float32, torch.bfloat16):
        yield TopKConfig(dtype, TopKOutput.VALUES)


_presets = {"llama-bf16": _llama_configs, "gemma": _llama_configs}


@register_generator(aot=_aot_configs, presets=_presets)
def gen_topk_module(config: TopKConfig) -> JitSpec:
    """The module with ``top_k``, for one configuration."""
    return JitSpec.from_config(config, ["topk.cu", "topk_jit_binding.cc"])
