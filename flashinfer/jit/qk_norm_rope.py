"""Modules of csrc/qk_norm_rope.cu: norm and rotation of the Q and K of video tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator


@dataclass(frozen=True)
class QkNormRopeConfig(ModuleConfig):
    """Selects code; `out_dtype` is `dtype` or float8_e4m3fn."""

    module: ClassVar[str] = "qk_norm_rope"

    dtype: torch.dtype
    out_dtype: torch.dtype
    interleave: bool = True
    norm: bool = True

    def __post_init__(self) -> None:
        check_dtype("qkv", self.dtype, FLOAT)
        check_dtype("q_out", self.out_dtype, (self.dtype, torch.float8_e4m3fn))


def _aot_configs() -> Iterator[QkNormRopeConfig]:
    for out_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        yield QkNormRopeConfig(torch.bfloat16, out_dtype)


@register_generator(aot=_aot_configs, presets={"video": _aot_configs})
def gen_qk_norm_rope_module(config: QkNormRopeConfig) -> JitSpec:
    """The module with ``qk_norm_rope`` for one configuration."""
    sources = ["qk_norm_rope.cu", "qk_norm_rope_jit_binding.cc"]
    return JitSpec.from_config(config, sources)
