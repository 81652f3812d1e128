"""Modules of Mamba: token by token, with rings of tokens that are replayed, and in chunks."""

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

STATE_SIZES = (16, 32, 64, 128, 256)
SSD_STATE_SIZES = (64, 128)
SCALED = (torch.int16, torch.int8, torch.float8_e4m3fn)
"""States stored with a scale per row."""


@dataclass(frozen=True)
class SelectiveStateConfig(ModuleConfig):
    """What selects code; numbers of heads, channels and tokens are run-time arguments.

    `tied`: A, dt and dt_bias are one number per head (Mamba-2). `stochastic`: a 16-bit state is
    rounded at random.
    """

    module: ClassVar[str] = "selective_state"
    supported_major_versions: ClassVar[tuple[int, ...]] = (8, 9, 10, 11, 12)

    dtype: torch.dtype
    state_dtype: torch.dtype
    dt_dtype: torch.dtype
    a_dtype: torch.dtype
    weight_dtype: torch.dtype
    dstate: int
    tied: bool = True
    stochastic: bool = False

    def __post_init__(self) -> None:
        check_dtype("x", self.dtype, FLOAT)
        check_dtype("state", self.state_dtype, (*FLOAT, *SCALED))
        check_dtype("dt", self.dt_dtype, FLOAT)
        check_dtype("A", self.a_dtype, FLOAT)
        check_dtype("D", self.weight_dtype, FLOAT)
        if self.dstate not in STATE_SIZES:
            raise ValueError(
                f"`state` must have a last dimension of {STATE_SIZES}, got {self.dstate}"
            )
        if self.stochastic:
            check_dtype("state", self.state_dtype, HALF)


def _linear_configs() -> Iterator[SelectiveStateConfig]:
    bf16, fp32 = torch.bfloat16, torch.float32
    for state_dtype in (bf16, torch.float16, fp32):
        yield SelectiveStateConfig(bf16, state_dtype, bf16, fp32, bf16, 128)
    yield SelectiveStateConfig(bf16, torch.float16, bf16, fp32, bf16, 128, stochastic=True)


@register_generator(aot=_linear_configs, presets={"linear": _linear_configs})
def gen_selective_state_update_module(config: SelectiveStateConfig | None = None) -> JitSpec:
    """The module with ``selective_state``; by default of bfloat16 with a state of 128."""
    config = config or next(_linear_configs())
    csrc = jit_env.FLASHINFER_CSRC_DIR
    return JitSpec.from_config(
        config, [csrc / "selective_state.cu", csrc / "selective_state_jit_binding.cc"]
    )


@dataclass(frozen=True)
class CheckpointingSsuConfig(SelectiveStateConfig):
    """As `SelectiveStateConfig`, of `checkpointing_ssu`; always `tied`."""

    module: ClassVar[str] = "checkpointing_ssu"


@dataclass(frozen=True)
class ReplayssmMaterializeConfig(SelectiveStateConfig):
    """As `SelectiveStateConfig`, of `replayssm_materialize`; always `tied`."""

    module: ClassVar[str] = "replayssm_materialize"


def _checkpointing_configs() -> Iterator[CheckpointingSsuConfig]:
    bf16, fp32 = torch.bfloat16, torch.float32
    yield CheckpointingSsuConfig(bf16, bf16, bf16, fp32, bf16, 128)


@register_generator(aot=_checkpointing_configs, presets={"linear": _checkpointing_configs})
def gen_checkpointing_ssu_module(config: CheckpointingSsuConfig | None = None) -> JitSpec:
    """The module with ``checkpointing_ssu``; by default of bfloat16 with a state of 128."""
    config = config or next(_checkpointing_configs())
    csrc = jit_env.FLASHINFER_CSRC_DIR
    return JitSpec.from_config(
        config, [csrc / "checkpointing_ssu.cu", csrc / "checkpointing_ssu_jit_binding.cc"]
    )


def _materialize_configs() -> Iterator[ReplayssmMaterializeConfig]:
    bf16, fp32 = torch.bfloat16, torch.float32
    yield ReplayssmMaterializeConfig(bf16, bf16, fp32, fp32, fp32, 128)


@register_generator(aot=_materialize_configs, presets={"linear": _materialize_configs})
def gen_replayssm_materialize_module(config: ReplayssmMaterializeConfig | None = None) -> JitSpec:
    """The module with ``replayssm_materialize``; by default of bfloat16 with a state of 128."""
    config = config or next(_materialize_configs())
    csrc = jit_env.FLASHINFER_CSRC_DIR
    return JitSpec.from_config(
        config, [csrc / "replayssm_materialize.cu", csrc / "replayssm_materialize_jit_binding.cc"]
    )


@dataclass(frozen=True)
class SsdConfig(ModuleConfig):
    """What selects code of the chunked form; numbers of heads and tokens are run-time arguments."""

    module: ClassVar[str] = "ssd"
    supported_major_versions: ClassVar[tuple[int, ...]] = (8, 9, 10, 11, 12)

    dtype: torch.dtype
    state_dtype: torch.dtype
    dt_dtype: torch.dtype
    dstate: int

    def __post_init__(self) -> None:
        check_dtype("x", self.dtype, (torch.float16, torch.bfloat16))
        check_dtype("initial_states", self.state_dtype, FLOAT)
        check_dtype("dt", self.dt_dtype, FLOAT)
        if self.dstate not in SSD_STATE_SIZES:
            raise ValueError(
                f"`B` must have a last dimension of {SSD_STATE_SIZES}, got {self.dstate}"
            )


def _ssd_configs() -> Iterator[SsdConfig]:
    bf16, fp32 = torch.bfloat16, torch.float32
    for state_dtype in (fp32, bf16):
        yield SsdConfig(bf16, state_dtype, bf16, 128)


@register_generator(aot=_ssd_configs, presets={"linear": _ssd_configs})
def gen_ssd_module(config: SsdConfig | None = None) -> JitSpec:
    """The module with ``ssd``; by default of bfloat16 with a float32 state of 128."""
    config = config or next(_ssd_configs())
    csrc = jit_env.FLASHINFER_CSRC_DIR
    return JitSpec.from_config(config, [csrc / "ssd.cu", csrc / "ssd_jit_binding.cc"])
