"""Mamba-2 with states that are written seldom: the latest tokens are kept, and replayed.

A slot has a state, and a ring with the inputs of the tokens since then. A step reads the state,
takes those tokens once more in registers, and goes on with the new ones, whose inputs it appends.
Drafts that are refused cost nothing: the caller counts the accepted tokens, and the next step
overwrites the others. Where the ring has no room for another step, the state is written with the
replayed tokens in it::

    S' = S after the replayed tokens              (written if replayed + new tokens > window)
    S' = exp(A dt) S' + (dt x) B;  out = (S' C + D x) silu(z)      for each new token

Source: T. Dao and A. Gu, "Transformers are SSMs", 2024, for the recurrence.
"""

from typing import Any

import torch

from .._common.checks import count as check_count
from .._common.checks import cuda_tensors
from .._common.checks import flag as check_flag
from .._common.checks import tensor as check_tensor
from .._instrument.decorator import flashinfer_api
from .._linear_attention.selective_state import check_rounding, get_checkpointing_kernel
from ..jit.mamba import CheckpointingSsuConfig
from ..trace.templates.checkpointing_ssu import checkpointing_ssu_trace

__all__ = ["allocate_checkpointing_ssu_scratch", "checkpointing_ssu"]

_ALGORITHMS = ("auto", "monolith", "two-kernel")


def allocate_checkpointing_ssu_scratch(
    batch_size: int,
    num_heads: int,
    num_predicted_tokens: int,
    max_window: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors for the scratch arguments of ``checkpointing_ssu``, which does not need them.

    Parameters
    ----------
    batch_size, num_heads : int
        Sizes of the calls that they serve.
    num_predicted_tokens, max_window : int
        New tokens of a sequence, and how many tokens are replayed at most.
    dtype : torch.dtype
        The dtype of `x`.
    device : torch.device or str
        Where they go.

    Returns
    -------
    tuple of torch.Tensor
        ``[batch_size, num_heads, 32, 8]`` of `dtype`, ``[batch_size, num_heads, tokens]`` float32
        with `num_predicted_tokens` rounded up to 16, and
        ``[batch_size, num_heads, 32, window / 2]`` of `dtype` with `max_window` rounded up to 8:
        `cb_scaled`, `cumAdt_vec` and `cb_old`.

    Raises
    ------
    ValueError
        If a size is negative.
    """
    check_count("batch_size", batch_size, 0)
    check_count("num_heads", num_heads)
    tokens = -(-check_count("num_predicted_tokens", num_predicted_tokens) // 16) * 16
    window = -(-check_count("max_window", max_window) // 8) * 8
    shape = (batch_size, num_heads)
    return (
        torch.empty((*shape, 32, 8), dtype=dtype, device=device),
        torch.empty((*shape, tokens), dtype=torch.float32, device=device),
        torch.empty((*shape, 32, window // 2), dtype=dtype, device=device),
    )


@flashinfer_api(trace=checkpointing_ssu_trace)
def checkpointing_ssu(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    d_split: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    cb_scaled: torch.Tensor | None = None,
    cumAdt_vec: torch.Tensor | None = None,
    cb_old: torch.Tensor | None = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
) -> torch.Tensor:
    """Outputs of new tokens on states that lack the tokens of their rings.

    The call reads `ring_start` and `prev_num_accepted_tokens` and writes neither. Before the next
    one, the caller adds the accepted tokens to `prev_num_accepted_tokens`; for a sequence with
    ``prev_num_accepted_tokens + tokens > window`` it first moves `ring_start` by the former, modulo
    the ring's rows, and sets that to zero, since the state has those tokens now.

    Parameters
    ----------
    state : torch.Tensor
        Pool ``[slots, heads, dim, dstate]`` as for ``selective_state_update``; overwritten for
        sequences whose ring is full.
    x_cache : torch.Tensor
        ``[slots, heads, rows, dim]``, dtype of `x`: the rings. The window is `rows` minus the
        tokens of a sequence (`max_seqlen` with `cu_seqlens`), and at least as long as these. Of
        this and the next two, slots may be strided and are contiguous in themselves; the new
        tokens are written to rows ``(ring_start + prev_num_accepted_tokens + i) % rows``.
    B_cache : torch.Tensor
        ``[slots, groups, rows, dstate]``, dtype of `x`.
    dt_cache : torch.Tensor
        ``[slots, heads, rows]``, float32: time steps with their bias and softplus.
    ring_start, prev_num_accepted_tokens : torch.Tensor
        ``[slots]``, int32: the row of the oldest token that the state lacks, and how many it lacks,
        from 0 to the window.
    x, z, out : torch.Tensor
        ``[batch, tokens, heads, dim]``, or with `cu_seqlens` ``[1, total_tokens, heads, dim]``;
        bfloat16, float16 or float32, last dimension contiguous. `z` may be None.
    dt : torch.Tensor
        Shape of `x`, expanded from one number per token and head.
    A : torch.Tensor
        ``[heads, dim, dstate]``, expanded from one number per head.
    B, C : torch.Tensor
        ``[batch, tokens, groups, dstate]``, dtype of `x`.
    D, dt_bias : torch.Tensor, optional
        ``[heads, dim]``, of one dtype; `dt_bias` is expanded from one number per head.
    dt_softplus : bool
        Take the softplus of ``dt + dt_bias``.
    state_batch_indices : torch.Tensor, optional
        ``[batch]``, int32 or int64: the slot of each sequence; by default sequence i has slot i. A
        sequence with `pad_slot_id`, or a slot that the pool has not, is padding: its output is zero
        and nothing else is touched.
    pad_slot_id : int
        The slot that means none.
    state_scale, rand_seed, philox_rounds
        As for ``selective_state_update``.
    cu_seqlens : torch.Tensor, optional
        ``[batch + 1]``, int32 or int64: where sequences begin in the packed tokens.
    max_seqlen : int, optional
        With `cu_seqlens`, and only then: a bound of their lengths.
    enable_pdl : bool
        Accepted: launches overlap where the device can.
    d_split, cb_scaled, cumAdt_vec, cb_old, precompute_heads_per_cta, algorithm
        Of several kernels; there is one, and results do not depend on them. `algorithm` is "auto",
        "monolith" or "two-kernel".

    Returns
    -------
    torch.Tensor
        `out`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"`algorithm` must be one of {_ALGORITHMS}, got {algorithm!r}")
    check_tensor("state", state, 4)
    for name, tensor in (("x", x), ("dt", dt), ("B", B), ("C", C), ("out", out)):
        check_tensor(name, tensor, 4)
    check_tensor("A", A, 3)
    check_tensor("x_cache", x_cache, 4)
    window = _window(x_cache.shape[2], x.shape[1], cu_seqlens, max_seqlen)
    cuda_tensors(state=state, x=x)
    if A.stride(1) != 0 or A.stride(2) != 0:
        raise ValueError("`A` must be expanded from one number per head")
    check_rounding(rand_seed, philox_rounds, state_scale)
    config = CheckpointingSsuConfig(
        x.dtype,
        state.dtype,
        dt.dtype,
        A.dtype,
        torch.float32 if (w := D if D is not None else dt_bias) is None else w.dtype,
        state.shape[-1],
        True,
        rand_seed is not None,
    )
    get_checkpointing_kernel(config)(
        out, x, dt, A, B, C,
        (D, z, dt_bias),
        (state, state_scale, rand_seed, philox_rounds),
        (cu_seqlens, state_batch_indices, pad_slot_id),
        (x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, window),
        int(check_flag("dt_softplus", dt_softplus)),
    )  # fmt: skip
    return out


def _window(rows: int, tokens: int, cu_seqlens: Any, max_seqlen: int | None) -> int:
    """How many tokens are replayed at most: what a ring has beside those of one step."""
    if (cu_seqlens is None) != (max_seqlen is None):
        raise ValueError("`cu_seqlens` and `max_seqlen` belong together")
    if max_seqlen is not None:
        tokens = check_count("max_seqlen", max_seqlen)
    if rows < 2 * tokens:
        raise ValueError(f"`x_cache` must have at least {2 * tokens} rows, got {rows}")
    return rows - tokens
