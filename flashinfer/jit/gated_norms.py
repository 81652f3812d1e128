"""Modules of the norms with gates: of the residual stream, of heads, and of transformers' rows."""

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
class GatedResidualConfig(ModuleConfig):
    """Selects code of csrc/gated_residual.cu: the branch's dtype, and whether a norm follows."""

    module: ClassVar[str] = "gated_residual"

    dtype: torch.dtype
    next: bool

    def __post_init__(self) -> None:
        check_dtype("branch", self.dtype, HALF)


@dataclass(frozen=True)
class SigmoidGateConfig(ModuleConfig):
    """Selects code of csrc/sigmoid_gate.cu: the dtype."""

    module: ClassVar[str] = "sigmoid_gate"

    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype, HALF)


@dataclass(frozen=True)
class ModulatedLayernormConfig(ModuleConfig):
    """Selects code of csrc/modulated_layernorm.cu: dtype, gate, weights or scale and shift."""

    module: ClassVar[str] = "modulated_layernorm"

    dtype: torch.dtype
    gate: bool
    affine: bool

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype, HALF)


def _residual_configs() -> Iterator[GatedResidualConfig]:
    for next in (False, True):
        yield GatedResidualConfig(torch.bfloat16, next)


def _head_configs() -> Iterator[SigmoidGateConfig]:
    yield SigmoidGateConfig(torch.bfloat16)


def _video_configs() -> Iterator[ModulatedLayernormConfig]:
    for gate, affine in ((True, True), (True, False), (False, False)):
        yield ModulatedLayernormConfig(torch.bfloat16, gate, affine)


@register_generator(aot=_residual_configs, presets={"video": _residual_configs})
def gen_gated_residual_module(config: GatedResidualConfig) -> JitSpec:
    """The module with ``gated_residual`` for one configuration."""
    return JitSpec.from_config(config, ["gated_residual.cu", "gated_residual_jit_binding.cc"])


@register_generator(aot=_head_configs, presets={"linear": _head_configs})
def gen_sigmoid_gate_module(config: SigmoidGateConfig) -> JitSpec:
    """The module with ``sigmoid_gate`` for one configuration."""
    return JitSpec.from_config(config, ["sigmoid_gate.cu", "sigmoid_gate_jit_binding.cc"])


@register_generator(aot=_video_configs, presets={"video": _video_configs})
def gen_modulated_layernorm_module(config: ModulatedLayernormConfig) -> JitSpec:
    """The module with ``modulated_layernorm`` for one configuration."""
    sources = ["modulated_layernorm.cu", "modulated_layernorm_jit_binding.cc"]
    return JitSpec.from_config(config, sources)
