"""Modules of csrc/rope.cu: rotary embedding, also into a quantised result or a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, FLOAT8, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator


@dataclass(frozen=True)
class RopeConfig(ModuleConfig):
    """Selects code.

    `computed`: angles come from frequencies, else from a cache of `cache_dtype`. `out_dtype` is
    `dtype`, or an 8-bit float. `append`: K and V go to a paged cache; `keeps_rows`: only they have
    `out_dtype`, and heads may have a norm. Sizes, strides and frequencies are run-time arguments.
    """

    module: ClassVar[str] = "rope"

    dtype: torch.dtype
    out_dtype: torch.dtype
    interleave: bool
    computed: bool = False
    cache_dtype: torch.dtype = torch.float32
    append: bool = False
    keeps_rows: bool = False

    def __post_init__(self) -> None:
        check_dtype("q", self.dtype, FLOAT)
        if self.out_dtype != self.dtype:
            check_dtype("quantize_dtype", self.out_dtype, FLOAT8)
        check_dtype("cos_sin_cache", self.cache_dtype, FLOAT)
        if self.keeps_rows and (self.computed or not self.append):
            raise ValueError(
                "`keeps_rows` must be False unless K and V are appended by cached angles"
            )


def _appending(dtype: torch.dtype, cached: torch.dtype, interleave: bool = False) -> RopeConfig:
    return RopeConfig(dtype, cached, interleave, append=True, keeps_rows=True)


def _aot_configs() -> Iterator[RopeConfig]:
    for dtype in (torch.float16, torch.bfloat16):
        for interleave in (False, True):
            for computed in (False, True):
                yield RopeConfig(dtype, dtype, interleave, computed)
            for append in (False, True):
                yield RopeConfig(dtype, torch.float8_e4m3fn, interleave, append=append)
            for cached in (dtype, torch.float8_e4m3fn):
                yield _appending(dtype, cached, interleave)


def _llama_configs() -> Iterator[RopeConfig]:
    for computed in (False, True):
        yield RopeConfig(torch.bfloat16, torch.bfloat16, interleave=False, computed=computed)
    yield _appending(torch.bfloat16, torch.bfloat16)


def _fp8_configs() -> Iterator[RopeConfig]:
    for append in (False, True):
        yield RopeConfig(torch.bfloat16, torch.float8_e4m3fn, interleave=False, append=append)
    yield _appending(torch.bfloat16, torch.float8_e4m3fn)


def _mla_configs() -> Iterator[RopeConfig]:
    for interleave in (False, True):
        for out_dtype in (torch.bfloat16, torch.float8_e4m3fn):
            yield RopeConfig(torch.bfloat16, out_dtype, interleave)


_presets = {
    "llama-bf16": _llama_configs,
    "gemma": _llama_configs,
    "fp8": _fp8_configs,
    "mla": _mla_configs,
}


@register_generator(aot=_aot_configs, presets=_presets)
def gen_rope_module(config: RopeConfig) -> JitSpec:
    """The module with ``rope`` or ``rope_with_cache``, or their quantising forms."""
    quantizes = config.out_dtype != config.dtype
    name = "rope_append" if config.keeps_rows else "rope_quantize" if quantizes else "rope"
    return JitSpec.from_config(config, ["rope.cu", f"{name}_jit_binding.cc"])
