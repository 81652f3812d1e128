"""The kernels of sparse attention's scores, called with tensors in their own form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from .._common import checks
from .._common.arch import get_device_sm_count
from ..jit.mqa_logits import (
    MAX_COLUMNS,
    MqaLogitsConfig,
    gen_mqa_logits_module,
    gen_mqa_schedule_module,
)

UNIT = 256
"""Tokens that a CTA scores at a time."""


@functools.cache
def get_mqa_logits_kernel(config: MqaLogitsConfig) -> Callable[..., None]:
    """The kernel of a configuration, built at the first call."""
    return gen_mqa_logits_module(config).build_and_load().mqa_logits


@functools.cache
def get_mqa_logits_check(config: MqaLogitsConfig) -> Callable[..., None]:
    """The checks of the kernel of a configuration, without the kernel."""
    return gen_mqa_logits_module(config).build_and_load().mqa_logits_check


@functools.cache
def get_mqa_schedule_kernel() -> Callable[..., None]:
    """The kernel that shares out the work of paged calls."""
    return gen_mqa_schedule_module().build_and_load().mqa_schedule


def schedule_of(seq_lens: torch.Tensor, parts: int, out: torch.Tensor | None) -> torch.Tensor:
    """``[parts + 1, 2]`` int32: the request and its unit where each part begins."""
    checks.cuda_tensors(seq_lens=seq_lens)
    if out is None:
        out = torch.empty((parts + 1, 2), dtype=torch.int32, device=seq_lens.device)
    elif tuple(checks.tensor("out", out, 2).shape) != (parts + 1, 2):
        raise ValueError(f"`out` must have shape {[parts + 1, 2]}, got {list(out.shape)}")
    get_mqa_schedule_kernel()(out, seq_lens, None)
    return out


def paged_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_length: int,
    schedule: torch.Tensor | None,
    out: torch.Tensor,
    names: Mapping[str, str],
    *,
    cleared: torch.Tensor | None = None,
) -> None:
    """Write the logits of ``[batch, next_n, heads, 128]`` queries to `out`.

    `names` are the caller's of the kernel's arguments. `cleared` is a part of `out` that becomes
    minus infinity before; a call that is refused leaves it alone.
    """
    checks.cuda_tensors(q=q)
    heads, next_n = q.shape[2], q.shape[1]
    queries = 1
    while queries < next_n and 2 * queries * heads <= MAX_COLUMNS:
        queries *= 2
    config = MqaLogitsConfig(out.dtype, heads, queries, True)
    if schedule is None:
        schedule = schedule_of(seq_lens, get_device_sm_count(q.device), None)
    sequences = (block_tables, seq_lens, schedule, next_n)
    arguments = (out, q.flatten(0, 1), weights, cache, None, sequences, max_length, None)
    try:
        if cleared is not None:
            get_mqa_logits_check(config)(*arguments)
            cleared.fill_(float("-inf"))
        get_mqa_logits_kernel(config)(*arguments)
    except (TypeError, ValueError):
        with checks.named(**names):
            raise


def ragged_logits(
    q: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the logits of ``[queries, heads, 128]`` queries to `out`."""
    checks.cuda_tensors(q=q)
    heads = q.shape[1]
    config = MqaLogitsConfig(out.dtype, heads, max(MAX_COLUMNS // max(heads, 1), 1), False)
    kernel = get_mqa_logits_kernel(config)
    kernel(out, q, weights, keys, scales, (starts, ends), keys.shape[0], None)
