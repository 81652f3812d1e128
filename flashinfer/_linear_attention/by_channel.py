"""The delta rule with a decay per key channel: in chunks for prompts, else token by token.

Chunks multiply operands of 16 bits, so their results are those of the gated delta rule's prefill;
token by token everything is float32 until it is rounded to a tensor's type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .._common import checks
from ..jit.delta_rule import CHUNK_HEAD_DIMS, ChunkKdaConfig, gen_chunk_kda_module
from .chunk_delta_rule import CHUNK_SIZE, has_room_for_chunks, progress_of_stages
from .delta_rule import Gates, States, flags_of, run_delta_rule

TOKENS_FOR_CHUNKS = 32
"""Tokens per sequence, on average, from which on prompts are walked in chunks."""


@functools.cache
def get_chunk_kda_kernel(config: ChunkKdaConfig) -> Callable[..., None]:
    """The kernel of a configuration, built at the first call."""
    return gen_chunk_kda_module(config).build_and_load().chunk_kda


def run_by_channel(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: Gates,
    states: States,
    *,
    scale: float,
    normalize_qk: bool,
    cu_seqlens: torch.Tensor | None = None,
    may_grow: bool = False,
) -> None:
    """Run the recurrence over the tokens of each sequence; `out` and the pools are written.

    `may_grow`: decays may exceed 1, and with them the operands of chunks what float16 can hold.
    """
    options: dict[str, Any] = {"scale": scale, "normalize_qk": normalize_qk}
    fits = not (may_grow and q.dtype == torch.float16)
    if not (fits and serves_chunks(out, q, k, v, gates, states, cu_seqlens)):
        run_delta_rule(out, q, k, v, gates, states, cu_seqlens=cu_seqlens, **options)
        return
    if cu_seqlens is None:
        batch, tokens = q.shape[:2]
        cu_seqlens = torch.arange(0, (batch + 1) * tokens, tokens, device=q.device)
        out, q, k, v = (_packed(x) for x in (out, q, k, v))
        gates = gates.packed()
    run_chunk_kda(out, q, k, v, gates, states, cu_seqlens, **options)


def serves_chunks(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: Gates,
    states: States,
    cu_seqlens: torch.Tensor | None,
) -> bool:
    """Whether a call is a prompt that chunks serve, by what the host knows of it."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tokens = q.shape[0] * q.shape[1]
    if sequences == 0 or tokens < TOKENS_FOR_CHUNKS * sequences:
        return False
    if states.write_every_token or states.num_accepted is not None or states.key_major:
        return False
    if states.snapshots is not None and states.snapshot_every % CHUNK_SIZE != 0:
        return False
    if q.shape[3] not in CHUNK_HEAD_DIMS or v.shape[3] % 64 != 0 or not has_room_for_chunks(q):
        return False
    read = [x for x in (q, k, v, gates.gate, gates.dt_bias) if x is not None]
    if gates.gate is None or not all(_has_vectors(x, 16) for x in read):
        return False
    rows = [x for x in (out, q, k, v, gates.gate, gates.beta) if x is not None]
    packable = cu_seqlens is not None or all(_is_packable(x) for x in rows)
    return packable and _has_vectors(out, 4)


def _has_vectors(tensor: torch.Tensor, size: int) -> bool:
    """Whether rows begin at multiples of so many bytes and are contiguous."""
    *strides, last = tensor.stride()
    *shape, _ = tensor.shape
    aligned = tensor.data_ptr() % size == 0 and last == 1
    return aligned and all(
        count <= 1 or stride * tensor.element_size() % size == 0
        for count, stride in zip(shape, strides, strict=True)
    )


def _is_packable(tensor: torch.Tensor) -> bool:
    """Whether the tokens of all batches lie one after the other."""
    return tensor.shape[0] == 1 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(0, 1)[None]


def run_chunk_kda(
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
    """Run the recurrence over packed sequences in chunks; `out` and the pools are written.

    `at_once`: as for `run_chunk_delta_rule`.
    """
    checks.cuda_tensors(q=q, k=k, v=v)
    assert gates.gate is not None
    slots = q.shape[1] // CHUNK_SIZE + cu_seqlens.shape[0] - 1
    heads, dim = out.shape[2], q.shape[3]
    square = (slots, heads, CHUNK_SIZE * CHUNK_SIZE)
    operands = torch.empty((slots, heads, 3 * CHUNK_SIZE * dim), dtype=q.dtype, device=q.device)
    matrices = torch.empty((2, *square), dtype=q.dtype, device=q.device)
    factors = torch.empty((slots, heads, dim), dtype=torch.float32, device=q.device)
    progress = progress_of_stages(v, cu_seqlens, slots, heads, at_once)
    none = torch.float32
    config = ChunkKdaConfig(
        q.dtype,
        states.dtype,
        gates.gate.dtype,
        none if gates.beta is None else gates.beta.dtype,
        none if gates.dt_bias is None else gates.dt_bias.dtype,
        dim,
    )
    get_chunk_kda_kernel(config)(
        out, q, k, v,
        (gates.gate, gates.beta, gates.a_log, gates.dt_bias, gates.lower_bound, int(gates.form)),
        (states.initial, states.final, states.read_slots, states.write_slots),
        (states.snapshots, states.snapshot_starts, states.snapshot_every),
        cu_seqlens,
        (operands, matrices[0], matrices[1], factors, progress),
        scale,
        flags_of(gates, states, normalize_qk),
        schedule,
    )  # fmt: skip
