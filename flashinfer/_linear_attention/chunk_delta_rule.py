"""The chunked delta rule kernels, called with packed tensors and their workspace."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .._common import checks
from .._common.arch import get_compute_capability
from .._common.driver import get_stream_sm_count
from ..jit.delta_rule import ChunkDeltaRuleConfig, gen_chunk_delta_rule_module
from .delta_rule import Gates, States, flags_of

CHUNK_SIZE = 64
_SLOTS_PER_COUNTER = 8
_MANY_SLOTS = 64
_SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities whose CTAs may have 99 KiB of shared memory."""


def has_room_for_chunks(q: torch.Tensor) -> bool:
    """Whether a CTA may have the shared memory that two chunks take."""
    return not q.is_cuda or get_compute_capability(q.device) not in _SMALL


@functools.cache
def get_chunk_delta_rule_kernel(config: ChunkDeltaRuleConfig) -> Callable[..., None]:
    """The kernel of a configuration, built at the first call."""
    module = gen_chunk_delta_rule_module(config).build_and_load()
    return module.chunk_delta_rule


def progress_of_stages(
    v: torch.Tensor, cu_seqlens: torch.Tensor, slots: int, heads: int, at_once: bool | None
) -> torch.Tensor | None:
    """Counters by which stages run at once; None: one after the other.

    `at_once` None: if the second stage has few CTAs and long to go.
    """
    if at_once is None:
        ctas = (cu_seqlens.shape[0] - 1) * heads * (v.shape[3] // 64)
        at_once = slots >= _MANY_SLOTS and 2 * ctas <= get_stream_sm_count(v.device)
    if not at_once:
        return None
    counters = (slots + _SLOTS_PER_COUNTER - 1) // _SLOTS_PER_COUNTER
    return torch.zeros((counters, heads), dtype=torch.int32, device=v.device)


def run_chunk_delta_rule(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: Gates,
    states: States,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    normalize_qk: bool,
    schedule: int = 0,
    at_once: bool | None = None,
) -> None:
    """Run the recurrence over packed sequences; `out` and the pools are written.

    `at_once`: whether the stages overlap; by default if the second has few CTAs and long to go.
    """
    checks.cuda_tensors(q=q, k=k, v=v)
    slots = q.shape[1] // CHUNK_SIZE + cu_seqlens.shape[0] - 1
    heads, square = out.shape[2], CHUNK_SIZE * CHUNK_SIZE
    matrices = torch.empty((2, slots, heads, square), dtype=q.dtype, device=q.device)
    factors = torch.empty((slots, heads, 4 * CHUNK_SIZE), dtype=torch.float32, device=q.device)
    progress = progress_of_stages(v, cu_seqlens, slots, heads, at_once)
    config = ChunkDeltaRuleConfig(q.dtype, states.dtype, q.shape[-1])
    get_chunk_delta_rule_kernel(config)(
        out,
        q,
        k,
        v,
        (gates.gate, gates.beta, int(gates.form)),
        (states.initial, states.final, states.read_slots, states.write_slots),
        (states.snapshots, states.snapshot_starts, states.snapshot_every),
        cu_seqlens,
        (matrices[0], matrices[1], factors, progress),
        scale,
        flags_of(gates, states, normalize_qk),
        schedule,
    )
