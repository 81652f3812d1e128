"""Prefill of the gated delta rule: whole sequences, in chunks of 64 tokens.

Source: S. Yang, J. Kautz and A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta
Rule", 2024; the chunked form from S. Yang et al., "Parallelizing Linear Transformers with the Delta
Rule over Sequence Length", 2024. docs/linear_attention.md derives what the kernels compute.
"""

from typing import Any

import torch

from ._common.checks import count as check_count
from ._common.checks import tensor as check_tensor
from ._common.dtypes import FLOAT, check_dtype
from ._instrument.decorator import flashinfer_api
from ._linear_attention.checks import (
    check_backend,
    check_flags,
    check_operands,
    count_sequences,
    destination,
    resolve_scale,
)
from ._linear_attention.chunk_delta_rule import (
    CHUNK_SIZE,
    has_room_for_chunks,
    run_chunk_delta_rule,
)
from ._linear_attention.delta_rule import GateForm, Gates, States, run_delta_rule
from ._linear_attention.pools import read_checkpoints
from .jit.delta_rule import CHUNK_HEAD_DIMS
from .trace.templates.gated_delta_product import chunk_gated_delta_product_trace
from .trace.templates.gated_delta_rule import chunk_gated_delta_rule_trace

__all__ = ["chunk_gated_delta_product", "chunk_gated_delta_rule"]


@flashinfer_api(trace=chunk_gated_delta_rule_trace)
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: bool | str = "auto",
    state_indices: torch.Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gated delta rule over packed sequences.

    Per state head, from the initial state ``S`` of ``[head_dim_v, head_dim_k]`` (zeros if there is
    none), for each token: ``S = g S; S += beta (v - S k) k^T; output = scale S q``. Products have
    16-bit operands and float32 sums; gates, the inverse within a chunk and the running state are
    float32.

    Parameters
    ----------
    q : torch.Tensor
        ``[tokens, q_heads, head_dim_k]``, float16 or bfloat16, last dimension contiguous, rows at
        multiples of 16 bytes. The tokens of all sequences lie one after the other.
    k : torch.Tensor
        ``[tokens, k_heads, head_dim_k]``, dtype of `q`.
    v : torch.Tensor
        ``[tokens, v_heads, head_dim_v]``, dtype of `q`. There are
        ``state_heads = max(q_heads, v_heads)`` states, and each of the numbers of heads divides
        that; consecutive state heads share a head.
    g : torch.Tensor, optional
        ``[tokens, state_heads]``, float32: the decay itself, from 0 to 1, not its logarithm; 1
        if None.
    beta : torch.Tensor, optional
        ``[tokens, state_heads]``, float32: the learning rate; 1 if None.
    scale : float, optional
        Factor of the output; by default ``1 / sqrt(head_dim_k)``.
    initial_state : torch.Tensor, optional
        ``[sequences, state_heads, head_dim_v, head_dim_k]``, float32, bfloat16 or float16; with
        `state_indices` a pool of such states.
    output_final_state : bool
        Return the states after each sequence's last token as well.
    cu_seqlens : torch.Tensor
        ``[sequences + 1]``, int64 or int32: where sequences begin in the packed tokens, from 0 to
        their number, ascending. Required.
    use_qk_l2norm_in_kernel : bool
        Divide `q` and `k` by their Euclidean norms (with 1e-6 under the root).
    output : torch.Tensor, optional
        Result, ``[tokens, state_heads, head_dim_v]``, dtype of `q`.
    output_state : torch.Tensor, optional
        Final states, the shape of `initial_state` and its dtype (float32 without one). It may be
        `initial_state` itself. Written also if `output_final_state` does not ask for them.
    state_checkpoints : torch.Tensor, optional
        ``[checkpoints, state_heads, head_dim_v, head_dim_k]``, dtype of the states: receives the
        state after every `checkpoint_every_n_tokens` tokens of each sequence.
    checkpoint_cu_starts : torch.Tensor, optional
        ``[sequences + 1]``, int64: where each sequence's checkpoints begin.
    checkpoint_every_n_tokens : int
        A multiple of 64; 0: no checkpoints.
    use_cp, _cp_chunk_len, max_seqlen
        Hints of other implementations; results do not depend on them.
    state_indices : torch.Tensor, optional
        ``[sequences]``, int32 or int64: each sequence's slot in `initial_state`, which is read and,
        with `output_final_state` and no `output_state`, overwritten. A sequence with a slot that
        the pool has not is padding: its output is zero.
    backend : str
        "auto" or "flashinfer".

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        `output`, and the final states if `output_final_state`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    check_backend(backend, "auto", "flashinfer")
    check_flags(
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )
    check_operands(3, q=q, k=k, v=v)
    sequences = count_sequences(cu_seqlens)
    if initial_state is not None:
        check_tensor("initial_state", initial_state, 4)
    for name, given in (
        ("g", g), ("beta", beta), ("initial_state", initial_state), ("output_state", output_state),
        ("state_checkpoints", state_checkpoints),
    ):  # fmt: skip
        if isinstance(given, torch.Tensor):
            check_dtype(name, given.dtype, FLOAT)
    heads = max(q.shape[1], v.shape[1])
    out = destination("output", output, (q.shape[0], heads, v.shape[2]), q)
    final = _final_state(initial_state, output_state, state_indices, output_final_state,
                         (sequences, heads, v.shape[2], q.shape[2]), q.device)  # fmt: skip
    read_checkpoints(
        state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, multiple_of=CHUNK_SIZE
    )
    states = States(
        initial_state,
        final,
        read_slots=state_indices,
        write_slots=state_indices if final is initial_state else None,
        snapshots=state_checkpoints,
        snapshot_starts=checkpoint_cu_starts,
        snapshot_every=checkpoint_every_n_tokens or CHUNK_SIZE,
    )
    gates = Gates(_batched(g), _batched(beta), GateForm.LINEAR)
    options: dict[str, Any] = {
        "scale": resolve_scale(scale, q.shape[-1]),
        "normalize_qk": use_qk_l2norm_in_kernel,
        "cu_seqlens": cu_seqlens,
    }
    sizes_fit = q.shape[2] in CHUNK_HEAD_DIMS and v.shape[2] % 64 == 0
    chunked = sizes_fit and has_room_for_chunks(q)
    run = run_chunk_delta_rule if chunked else run_delta_rule
    run(out[None], q[None], k[None], v[None], gates, states, **options)
    if not output_final_state:
        return out
    assert final is not None
    return out, final


@flashinfer_api(trace=chunk_gated_delta_product_trace)
def chunk_gated_delta_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    num_householder: int = 1,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gated DeltaProduct over packed sequences: several updates of the state for each token.

    Per token: ``S = g S``, then ``S += beta_j (v_j - S k_j) k_j^T`` for each j below
    `num_householder`, then ``output = scale S q``. It is `chunk_gated_delta_rule` over so many
    times as many tokens, of which the first has the decay and the last the query.

    Parameters
    ----------
    q, g
        As for `chunk_gated_delta_rule`.
    k, v, beta
        As there, with ``num_householder * tokens`` rows: those of a token one after the other.
    num_householder : int
        Updates per token, at least 1.
    scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, output_state
        As there.
    cu_seqlens : torch.Tensor
        As there; it counts tokens.
    output : torch.Tensor, optional
        Result, ``[tokens, state_heads, head_dim_v]``.
    backend : str
        "auto".

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        `output` and, with `output_final_state`, the states.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.

    Notes
    -----
    J. Siems et al., "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder
    Products", 2025.
    """
    check_backend(backend, "auto")
    steps = check_count("num_householder", num_householder)
    bounds = check_tensor("cu_seqlens", cu_seqlens, 1) * steps
    check_operands(3, q=q, k=k, v=v)
    tokens, heads = q.shape[0], max(q.shape[1], v.shape[1])
    if v.shape[0] != steps * tokens:
        raise ValueError(
            f"`v` must have {steps} x {tokens} rows for `num_householder` {steps}, got shape "
            f"{list(v.shape)}"
        )
    out = destination("output", output, (tokens, heads, v.shape[2]), v)
    queries = q.new_zeros(tokens, steps, *q.shape[1:])
    queries[:, -1] = q
    decays = None
    if g is not None:
        check_tensor("g", g, 2)
        decays = g.new_ones(tokens, steps, g.shape[1])
        decays[:, 0] = g
        decays = decays.flatten(0, 1)
    result = chunk_gated_delta_rule(
        queries.flatten(0, 1), k, v, decays, beta, scale, initial_state, output_final_state,
        bounds, use_qk_l2norm_in_kernel,
        output_state=output_state,
    )  # fmt: skip
    every = result[0] if output_final_state else result
    assert isinstance(every, torch.Tensor)
    out.copy_(every.view(tokens, steps, *out.shape[1:])[:, -1])
    return (out, result[1]) if output_final_state else out


def _batched(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor[None]


def _final_state(
    initial: torch.Tensor | None,
    output: torch.Tensor | None,
    indices: torch.Tensor | None,
    wanted: bool,
    shape: tuple[int, int, int, int],
    device: torch.device,
) -> torch.Tensor | None:
    """Where final states go: `output`, the pool that they come from, or a new tensor."""
    if indices is not None and initial is None:
        raise ValueError("`state_indices` needs `initial_state`")
    if output is not None:
        return check_tensor("output_state", output, 4)
    if not wanted:
        return None
    if indices is not None:
        return initial
    dtype = torch.float32 if initial is None else initial.dtype
    return torch.empty(shape, dtype=dtype, device=device)
