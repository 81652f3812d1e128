"""Modules of hyper-connections: the mapping of streams before a layer, and that after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import HALF, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator


@dataclass(frozen=True)
class MhcPostConfig(ModuleConfig):
    """Selects code of csrc/mhc_post.cu: the dtype of the streams."""

    module: ClassVar[str] = "mhc_post"

    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_dtype("residual", self.dtype, HALF)


@dataclass(frozen=True)
class MhcPreConfig(ModuleConfig):
    """Selects code of csrc/mhc_pre.cu: dtype, and whether the kernel sums the streams' squares."""

    module: ClassVar[str] = "mhc_pre"

    dtype: torch.dtype
    prenorm: bool

    def __post_init__(self) -> None:
        check_dtype("residual", self.dtype, HALF)


def _post_configs() -> Iterator[MhcPostConfig]:
    yield MhcPostConfig(torch.bfloat16)


def _pre_configs() -> Iterator[MhcPreConfig]:
    for prenorm in (False, True):
        yield MhcPreConfig(torch.bfloat16, prenorm)


@register_generator(aot=_post_configs, presets={"deepseek": _post_configs})
def gen_mhc_post_module(config: MhcPostConfig) -> JitSpec:
    """The module with ``mhc_post`` for one dtype."""
    return JitSpec.from_config(config, ["mhc_post.cu", "mhc_post_jit_binding.cc"])


@register_generator(aot=_pre_configs, presets={"deepseek": _pre_configs})
def gen_mhc_pre_module(config: MhcPreConfig) -> JitSpec:
    """The module with ``mhc_pre`` for one configuration."""
    return JitSpec.from_config(config, ["mhc_pre.cu", "mhc_pre_jit_binding.cc"])
