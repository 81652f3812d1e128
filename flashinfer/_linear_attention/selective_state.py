"""Mamba's recurrent kernel, called with tensors in one form: [batch, tokens, heads, dim]."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .._common.checks import count as check_count
from ..jit.mamba import (
    CheckpointingSsuConfig,
    ReplayssmMaterializeConfig,
    SelectiveStateConfig,
    gen_checkpointing_ssu_module,
    gen_replayssm_materialize_module,
    gen_selective_state_update_module,
)


@functools.cache
def get_selective_state_kernel(config: SelectiveStateConfig) -> Callable[..., None]:
    """The kernel of a configuration, built at the first call."""
    module = gen_selective_state_update_module(config).build_and_load()
    return module.selective_state


@functools.cache
def get_checkpointing_kernel(config: CheckpointingSsuConfig) -> Callable[..., None]:
    """The kernel of a configuration that replays rings, built at the first call."""
    return gen_checkpointing_ssu_module(config).build_and_load().checkpointing_ssu


@functools.cache
def get_materialize_kernel(config: ReplayssmMaterializeConfig) -> Callable[..., None]:
    """The kernel of a configuration that writes states of rings, built at the first call."""
    return gen_replayssm_materialize_module(config).build_and_load().replayssm_materialize


def check_rounding(seed: torch.Tensor | None, rounds: int, scale: torch.Tensor | None) -> None:
    """Refuse options of rounding at random that have no effect together."""
    check_count("philox_rounds", rounds, 0)
    if seed is not None and scale is not None:
        raise ValueError("`rand_seed` and `state_scale` exclude each other")
    if seed is not None and rounds == 0:
        raise ValueError("`philox_rounds` must be at least 1 with `rand_seed`, got 0")
