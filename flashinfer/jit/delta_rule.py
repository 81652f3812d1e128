"""Modules of the delta rule (GDN, KDA): csrc/delta_rule.cu, chunk_delta_rule.cu, chunk_kda.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, HALF, check_dtype
from . import env as jit_env
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

HEAD_DIMS = (32, 64, 128, 256)
CHUNK_HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class DeltaRuleConfig(ModuleConfig):
    """What selects code; numbers of heads and tokens, and gate forms, are run-time arguments.

    `channel_gate`: the decay differs by key channel (KDA), not by head alone (GDN). `key_major`:
    states are ``[head_dim_k, head_dim_v]``.
    """

    module: ClassVar[str] = "delta_rule"
    supported_major_versions: ClassVar[tuple[int, ...]] = (8, 9, 10, 11, 12)

    dtype: torch.dtype
    state_dtype: torch.dtype
    gate_dtype: torch.dtype
    beta_dtype: torch.dtype
    bias_dtype: torch.dtype
    head_dim_k: int
    channel_gate: bool = False
    key_major: bool = False

    def __post_init__(self) -> None:
        check_dtype("q", self.dtype, HALF)
        check_dtype("state", self.state_dtype, FLOAT)
        check_dtype("g" if self.channel_gate else "a", self.gate_dtype, FLOAT)
        check_dtype("b", self.beta_dtype, FLOAT)
        check_dtype("dt_bias", self.bias_dtype, FLOAT)
        if self.head_dim_k not in HEAD_DIMS:
            raise ValueError(f"`q` must have a head size of {HEAD_DIMS}, got {self.head_dim_k}")


def _linear_configs() -> Iterator[DeltaRuleConfig]:
    bf16, fp32 = torch.bfloat16, torch.float32
    for state_dtype in (fp32, bf16):
        for bias_dtype in (fp32, bf16):
            yield DeltaRuleConfig(bf16, state_dtype, bf16, bf16, bias_dtype, 128)
    for state_dtype in (fp32, bf16):
        yield DeltaRuleConfig(bf16, state_dtype, bf16, bf16, fp32, 128, channel_gate=True)
    yield DeltaRuleConfig(bf16, fp32, bf16, bf16, fp32, 128, key_major=True)


@register_generator(aot=_linear_configs, presets={"linear": _linear_configs})
def gen_delta_rule_module(config: DeltaRuleConfig | None = None) -> JitSpec:
    """The module with ``delta_rule``; by default of bfloat16 with a float32 state of 128."""
    if config is None:
        config = next(_linear_configs())
    csrc = jit_env.FLASHINFER_CSRC_DIR
    return JitSpec.from_config(config, [csrc / "delta_rule.cu", csrc / "delta_rule_jit_binding.cc"])


@dataclass(frozen=True)
class ChunkDeltaRuleConfig(ModuleConfig):
    """Selects code of the chunked form."""

    module: ClassVar[str] = "chunk_delta_rule"
    supported_major_versions: ClassVar[tuple[int, ...]] = (8, 9, 10, 11, 12)

    dtype: torch.dtype
    state_dtype: torch.dtype
    head_dim_k: int

    def __post_init__(self) -> None:
        check_dtype("q", self.dtype, HALF)
        check_dtype("initial_state", self.state_dtype, FLOAT)
        if self.head_dim_k not in CHUNK_HEAD_DIMS:
            raise ValueError(
                f"`q` must have a head size of {CHUNK_HEAD_DIMS}, got {self.head_dim_k}"
            )


def _chunk_configs() -> Iterator[ChunkDeltaRuleConfig]:
    for state_dtype in (torch.float32, torch.bfloat16):
        yield ChunkDeltaRuleConfig(torch.bfloat16, state_dtype, 128)


@register_generator(aot=_chunk_configs, presets={"linear": _chunk_configs})
def gen_chunk_delta_rule_module(config: ChunkDeltaRuleConfig | None = None) -> JitSpec:
    """The module with ``chunk_delta_rule``; by default of bfloat16 with a float32 state of 128."""
    config = config or next(_chunk_configs())
    csrc = jit_env.FLASHINFER_CSRC_DIR
    return JitSpec.from_config(
        config, [csrc / "chunk_delta_rule.cu", csrc / "chunk_delta_rule_jit_binding.cc"]
    )


@dataclass(frozen=True)
class ChunkKdaConfig(ModuleConfig):
    """Selects code of the chunked form with a decay per key channel."""

    module: ClassVar[str] = "chunk_kda"
    supported_major_versions: ClassVar[tuple[int, ...]] = (8, 9, 10, 11, 12)

    dtype: torch.dtype
    state_dtype: torch.dtype
    gate_dtype: torch.dtype
    beta_dtype: torch.dtype
    bias_dtype: torch.dtype
    head_dim_k: int

    def __post_init__(self) -> None:
        check_dtype("q", self.dtype, HALF)
        check_dtype("initial_state", self.state_dtype, FLOAT)
        check_dtype("g", self.gate_dtype, FLOAT)
        check_dtype("beta", self.beta_dtype, FLOAT)
        check_dtype("dt_bias", self.bias_dtype, FLOAT)
        if self.head_dim_k not in CHUNK_HEAD_DIMS:
            raise ValueError(
                f"`q` must have a head size of {CHUNK_HEAD_DIMS}, got {self.head_dim_k}"
            )


def _kda_configs() -> Iterator[ChunkKdaConfig]:
    bf16, fp32 = torch.bfloat16, torch.float32
    for state_dtype in (fp32, bf16):
        yield ChunkKdaConfig(bf16, state_dtype, bf16, bf16, fp32, 128)


@register_generator(aot=_kda_configs, presets={"linear": _kda_configs})
def gen_chunk_kda_module(config: ChunkKdaConfig | None = None) -> JitSpec:
    """The module with ``chunk_kda``; by default of bfloat16 with a float32 state of 128."""
    config = config or next(_kda_configs())
    csrc = jit_env.FLASHINFER_CSRC_DIR
    return JitSpec.from_config(config, [csrc / "chunk_kda.cu", csrc / "chunk_kda_jit_binding.cc"])
