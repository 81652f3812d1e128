"""Modules of csrc/sampling.cu: softmax, sampling, and the filters top-k, top-p and min-p."""

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


class Filter(enum.Enum):
    """Which elements may be drawn; the values are the enumerators of ``SamplingFilter``."""

    NONE = "kNone"
    TOP_K = "kTopK"
    TOP_P = "kTopP"
    MIN_P = "kMinP"
    TOP_K_TOP_P = "kTopKTopP"
    TOP_K_TOP_P_JOINT = "kTopKTopPJoint"


class Output(enum.Enum):
    """Results that are computed from the kept elements; the enumerators of ``SamplingOutput``."""

    TOKEN = "kToken"
    PROBS = "kProbs"
    MASK = "kMask"


@dataclass(frozen=True)
class SamplingConfig(ModuleConfig):
    """What selects code; sizes, strides and per-row parameters are run-time arguments."""

    module: ClassVar[str] = "sampling"

    dtype: torch.dtype
    out_dtype: torch.dtype  # of probabilities and masks
    logits: bool  # the input is logits, else probabilities
    filter: Filter
    output: Output

    def __post_init__(self) -> None:
        check_dtype("logits" if self.logits else "probs", self.dtype, FLOAT)
        check_dtype("out", self.out_dtype, FLOAT)
        if self.filter is Filter.MIN_P and self.logits:
            raise ValueError("`filter` MIN_P is defined on probabilities, got logits")
        if self.output is Output.MASK and self.filter is Filter.NONE:
            raise ValueError("`output` MASK needs a filter, got Filter.NONE")


def _aot_configs() -> Iterator[SamplingConfig]:
    f32 = torch.float32
    for filter in Filter:
        yield SamplingConfig(f32, f32, False, filter, Output.TOKEN)
        if filter in (Filter.TOP_K, Filter.TOP_P):
            yield SamplingConfig(f32, f32, False, filter, Output.PROBS)
        if filter in (Filter.NONE, Filter.TOP_K_TOP_P, Filter.TOP_K_TOP_P_JOINT):
            yield SamplingConfig(f32, f32, True, filter, Output.TOKEN)
    for dtype in FLOAT:
        yield SamplingConfig(dtype, f32, True, Filter.NONE, Output.PROBS)
        yield SamplingConfig(dtype, dtype, True, Filter.TOP_K, Output.MASK)


def _llama_configs() -> Iterator[SamplingConfig]:
    f32 = torch.float32
    yield SamplingConfig(f32, f32, True, Filter.NONE, Output.PROBS)
    for filter in (Filter.TOP_K, Filter.TOP_P):
        yield SamplingConfig(f32, f32, False, filter, Output.PROBS)
    for filter in (Filter.NONE, Filter.MIN_P, Filter.TOP_K_TOP_P):
        yield SamplingConfig(f32, f32, False, filter, Output.TOKEN)


_presets = {"llama-bf16": _llama_configs, "gemma": _llama_configs}


@register_generator(aot=_aot_configs, presets=_presets)
def gen_sampling_module(config: SamplingConfig) -> JitSpec:
    """The module with ``sampling``, for one configuration."""
    return JitSpec.from_config(config, ["sampling.cu", "sampling_jit_binding.cc"])
