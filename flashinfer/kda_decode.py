"""Kimi Delta Attention (KDA): the delta rule with a decay per key channel.

Per value head, with the state ``S`` of ``[head_dim_v, head_dim_k]``::

    S = S diag(decay);  S = S + beta (v - S k) k^T;  out = scale S q

The decay is ``exp(g)`` or, from a raw gate, ``exp(lower_bound sigmoid(exp(A_log) (g + dt_bias)))``
or ``exp(-exp(A_log) softplus(g + dt_bias))``. All arithmetic is in float32, and the state is read
once and written once, whatever the number of tokens. Prompts are walked in chunks of 64 tokens,
whose products have 16-bit operands and float32 sums.

Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.
"""

import torch

from ._common.checks import named
from ._common.checks import number as check_number
from ._common.checks import tensor as check_tensor
from ._common.dtypes import HALF, check_dtype
from ._instrument.decorator import flashinfer_api
from ._linear_attention.checks import (
    check_backend,
    check_flags,
    check_slots,
    count_sequences,
    destination,
    resolve_scale,
)
from ._linear_attention.fused_kda import WIDTH, Layer
from ._linear_attention.kda import (
    check_gate_shapes,
    kda_gates,
    kda_states,
    refuse_unsupported,
    run_recurrence,
)
from ._linear_attention.pools import read_checkpoints
from ._linear_attention.short_convolution import History
from .trace.templates.kda import recurrent_kda_trace
from .trace.templates.kda_fused import fused_kda_decode_trace, packed_fused_kda_decode_trace
from .trace.templates.kda_packed import packed_kda_decode_trace

__all__ = ["fused_kda_decode", "packed_fused_kda_decode", "packed_kda_decode", "recurrent_kda"]

KdaResults = (
    tuple[torch.Tensor, torch.Tensor | None]
    | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
)

# Engines ask for it beside the function's name, and mean one kernel. Here a step is a kernel and
# operations of PyTorch around it, which are no faster than an engine's own.
_FUSED_KDA_DECODE_AVAILABLE = False


@flashinfer_api(trace=recurrent_kda_trace)
def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_spec_tokens: int | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    beta_is_logit: bool = False,
    seq_order: torch.Tensor | None = None,
    prefill_workspace: object | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    checkpoint_state_indices: torch.Tensor | None = None,
    *,
    disable_state_update: bool = False,
    correction_cache: torch.Tensor | None = None,
    kg_cache: torch.Tensor | None = None,
    backend: str | None = "auto",
) -> KdaResults:
    """KDA over the tokens of each sequence, one after the other.

    Prompts, by which sequences of 32 tokens or more on average are meant, are walked in chunks of
    64 tokens, whose products have 16-bit operands: for head sizes of keys of 64 and 128 and of
    values that 64 divides, if no state per token is asked for, checkpoints are multiples of 64
    tokens apart, and rows of `g`, `v` and `dt_bias` begin at multiples of 16 bytes too. Everything
    else is float32, token by token.

    Parameters
    ----------
    q, k : torch.Tensor
        ``[batch, tokens, heads, head_dim_k]``, float16 or bfloat16; the last dimension is
        contiguous, and rows start at multiples of 16 bytes. `head_dim_k` is 32, 64, 128 or 256.
        With `cu_seqlens` the batch is 1, and the sequences lie one after the other.
    v : torch.Tensor
        ``[batch, tokens, v_heads, head_dim_v]``, dtype of `q`; `v_heads` is a multiple of `heads`,
        and consecutive value heads share a query head.
    g : torch.Tensor
        ``[batch, tokens, v_heads, head_dim_k]``, float32, bfloat16 or float16: the logarithm of the
        decay or, with `use_gate_in_kernel`, the gate's input.
    beta : torch.Tensor
        ``[batch, tokens, v_heads]``: the learning rate or, with `beta_is_logit`, its logit.
    A_log : torch.Tensor, optional
        ``[v_heads]``, float32, with `use_gate_in_kernel` alone, which needs it.
    dt_bias : torch.Tensor, optional
        ``[v_heads, head_dim_k]`` or flat, contiguous; with `use_gate_in_kernel` alone.
    scale : float, optional
        Factor of the output; by default ``1 / sqrt(head_dim_k)``.
    initial_state : torch.Tensor, optional
        ``[sequences, v_heads, head_dim_v, head_dim_k]``, float32, bfloat16 or float16, or a pool of
        such states; overwritten by the last states. Zeros if None.
    output_final_state : bool
        Return the states as well: `initial_state`, or a new float32 tensor.
    use_qk_l2norm_in_kernel : bool
        Divide `q` and `k` by their Euclidean norms (with 1e-6 under the root).
    use_gate_in_kernel : bool
        Compute the decay from `g`, `A_log` and `dt_bias`.
    lower_bound : float, optional
        A negative number: the decay's lowest logarithm; None: the form with softplus.
    cu_seqlens : torch.Tensor, optional
        ``[sequences + 1]``, int32 or int64: where sequences begin in the packed tokens.
    ssm_state_indices : torch.Tensor, optional
        ``[sequences]``, int32 or int64: slots of the pool `initial_state`. A sequence with a
        slot that it has not is padding: its output is zero. With `num_spec_tokens`
        ``[sequences, 1 + num_spec_tokens]``: token t leaves the state in slot t of its sequence.
    num_spec_tokens : int, optional
        Tokens per sequence after the first one, at least 1. By default of `ssm_state_indices`,
        sequence i has the slots that begin at ``i (1 + num_spec_tokens)``.
    num_accepted_tokens : torch.Tensor, optional
        ``[sequences]``, int32, with `num_spec_tokens`: how many tokens of the last call were
        accepted; the state is read from the slot of the last of them. The first slot if None.
    output : torch.Tensor, optional
        Result, shape and dtype of `v`.
    initial_state_source, initial_state_indices : torch.Tensor, optional
        A pool that is read in place of `initial_state`, and the slot of each sequence in it.
    beta_is_logit : bool
        The learning rate is ``sigmoid(beta)``.
    seq_order, prefill_workspace
        Hints of other implementations; results do not depend on them.
    state_checkpoints : torch.Tensor, optional
        ``[checkpoints, v_heads, head_dim_v, head_dim_k]``, dtype of the states: receives the state
        after every `checkpoint_every_n_tokens` tokens of each sequence.
    checkpoint_cu_starts : torch.Tensor, optional
        ``[sequences + 1]``, int64: the first checkpoint of each sequence.
    checkpoint_every_n_tokens : int
        At least 1; 0: no checkpoints.
    checkpoint_state_indices : torch.Tensor, optional
        ``[checkpoints of all sequences]``, int32 or int64: the row of each checkpoint in
        `state_checkpoints`; negative: it is not kept. If None, checkpoint i has row i.
    disable_state_update : bool
        Leave `initial_state` as it is.
    correction_cache, kg_cache
        Not supported: None.
    backend : str, optional
        "auto" or "flashinfer", or None, "cute-dsl", "cudnn" or "cake", which mean the same here.

    Returns
    -------
    tuple
        `output`, the states or None, and `state_checkpoints` where they are given.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    check_backend(backend, "auto", "flashinfer", None, "cute-dsl", "cudnn", "cake")
    check_flags(
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )
    refuse_unsupported(correction_cache=correction_cache, kg_cache=kg_cache)
    checkpoints = read_checkpoints(
        state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, checkpoint_state_indices
    )
    for name, tensor in (("q", q), ("k", k), ("v", v), ("g", g)):
        check_tensor(name, tensor, 4)
    check_dtype("v", v.dtype, HALF)
    check_gate_shapes(g, beta, (*v.shape[:3], q.shape[3]))
    sequences = q.shape[0]
    if cu_seqlens is not None:
        sequences = count_sequences(cu_seqlens)
    out = destination("output", output, tuple(v.shape), v)
    gates = kda_gates(g, beta, A_log, dt_bias, lower_bound, use_gate_in_kernel, beta_is_logit)
    final = initial_state
    if final is None and output_final_state:
        shape = (sequences, v.shape[2], v.shape[3], q.shape[3])
        final = torch.zeros(shape, dtype=torch.float32, device=q.device)
    states = kda_states(
        initial_state,
        final,
        sequences,
        ssm_state_indices,
        num_spec_tokens,
        num_accepted_tokens,
        initial_state_source,
        initial_state_indices,
        disable_state_update,
    )
    run_recurrence(
        out,
        (q, k, v),
        gates,
        states,
        checkpoints,
        scale=resolve_scale(scale, q.shape[3]),
        normalize_qk=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )
    returned = final if output_final_state else None
    return (out, returned) if checkpoints is None else (out, returned, checkpoints.pool)


@flashinfer_api(trace=packed_kda_decode_trace)
def packed_kda_decode(
    mixed_qkv: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """`recurrent_kda` for one token of each sequence, with packed operands and raw gates.

    The lowest logarithm of a decay is -5, `raw_beta` has logits, and queries and keys are divided
    by their norms.

    Parameters
    ----------
    mixed_qkv : torch.Tensor
        ``[batch, 3 * heads * head_dim]``, float16 or bfloat16: after the convolution, all heads'
        queries, then keys, then values. Rows begin at multiples of 16 bytes.
    raw_gate : torch.Tensor
        ``[batch, heads * head_dim]``: input of the decay by key channel.
    raw_beta : torch.Tensor
        ``[batch, heads]``.
    A_log, dt_bias : torch.Tensor
        ``[heads]`` float32, and ``[heads, head_dim]`` or flat.
    state : torch.Tensor
        Pool ``[slots, heads, head_dim, head_dim]``, overwritten.
    state_indices : torch.Tensor
        ``[batch]``, int32 or int64; none of the pool's: padding, whose output is zero.
    output : torch.Tensor, optional
        Result, ``[batch, 1, heads, head_dim]``.

    Returns
    -------
    torch.Tensor
        `output`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    heads, dim = check_tensor("state", state, 4).shape[1:3]
    batch = check_tensor("mixed_qkv", mixed_qkv, 2).shape[0]
    check_dtype("mixed_qkv", mixed_qkv.dtype, HALF)
    for name, tensor, width in (
        ("mixed_qkv", mixed_qkv, 3 * heads * dim),
        ("raw_gate", raw_gate, heads * dim),
        ("raw_beta", raw_beta, heads),
    ):
        if tuple(check_tensor(name, tensor, 2).shape) != (batch, width):
            raise ValueError(f"`{name}` must have shape {[batch, width]}, got {list(tensor.shape)}")
    if check_tensor("dt_bias", dt_bias, 1, 2).numel() != heads * dim:
        raise ValueError(f"`dt_bias` must have {heads} x {dim} elements, got {list(dt_bias.shape)}")
    q, k, v = mixed_qkv.unflatten(1, (3, 1, heads, dim)).unbind(1)
    gate = raw_gate.unflatten(1, (1, heads, dim))
    with named(
        initial_state="state",
        output_state="state",
        ssm_state_indices="state_indices",
        g="raw_gate",
        beta="raw_beta",
    ):
        out, *_ = recurrent_kda(
            q, k, v, gate, raw_beta[:, None], A_log, dt_bias.reshape(heads, dim),
            initial_state=state,
            use_gate_in_kernel=True,
            lower_bound=-5.0,
            ssm_state_indices=state_indices,
            output=output,
            beta_is_logit=True,
        )  # fmt: skip
    return out


@flashinfer_api(trace=fused_kda_decode_trace)
def fused_kda_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    output_gate: torch.Tensor,
    norm_weight: torch.Tensor,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    output: torch.Tensor | None = None,
    *,
    backend: str = "cute-dsl",
    state_indices_mode: str | None = None,
) -> torch.Tensor:
    """One decode step of a KDA layer: convolution, SiLU, `recurrent_kda` and the gated norm.

    ``output = o / sqrt(mean(o^2) + norm_eps) norm_weight sigmoid(output_gate)`` with the
    recurrence's result ``o``. The recurrence is a kernel; what surrounds it is made of PyTorch's
    operations.

    Parameters
    ----------
    x : torch.Tensor
        ``[batch, 3 * heads * head_dim]``, float16 or bfloat16: queries of all heads, keys and
        values, before the convolution. `head_dim` is 32, 64, 128 or 256.
    weight : torch.Tensor
        ``[3, 4, heads * head_dim]``, floating point: taps for queries, keys and values, that of the
        token itself last.
    conv_state : torch.Tensor
        ``[slots, 3 * heads * head_dim, 3]``, dtype of `x`, any strides: the last inputs of each
        sequence, the newest last; overwritten.
    raw_gate, raw_beta : torch.Tensor
        ``[1, batch, heads, head_dim]`` and ``[1, batch, heads]``, floating point: input of the
        decay by key channel, and logits of the learning rate.
    A_log, dt_bias : torch.Tensor
        `heads` elements float32, and ``[heads, head_dim]`` or flat.
    state_indices : torch.Tensor
        ``[batch]``, int32 or int64: the slot of each sequence in both caches, distinct. One that is
        not positive, or past them: padding, whose output is zero, and no slot is touched.
    state : torch.Tensor
        ``[slots, heads, head_dim, head_dim]``, float32, bfloat16 or float16; overwritten.
    output_gate : torch.Tensor
        ``[batch, heads, head_dim]``, floating point.
    norm_weight : torch.Tensor
        ``[head_dim]``, floating point.
    lower_bound : float, optional
        As for `recurrent_kda`.
    norm_eps : float
        Added to the mean square.
    output : torch.Tensor, optional
        Result, ``[1, batch, heads, head_dim]``, dtype of `x`.
    backend : str
        "cute-dsl" or "auto", which are the same here.
    state_indices_mode : str, optional
        What the caller knows of `state_indices`: "positive_unique" or "unique_or_null"; no result
        depends on it. "repeated_positive" is refused.

    Returns
    -------
    torch.Tensor
        `output`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    check_backend(backend, "cute-dsl", "auto")
    if state_indices_mode not in (None, "positive_unique", "unique_or_null"):
        raise ValueError(
            "`state_indices_mode` must be None, 'positive_unique' or 'unique_or_null', got "
            f"{state_indices_mode!r}"
        )
    slots = check_slots("state_indices", state_indices, 1)
    starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
    layer = Layer(x, weight, conv_state, raw_gate, raw_beta, state, output_gate, norm_weight)
    return _decode_layer(
        layer, (A_log, dt_bias, lower_bound), slots[:, None], starts, None, norm_eps, output
    )


@flashinfer_api(trace=packed_fused_kda_decode_trace)
def packed_fused_kda_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    output_gate: torch.Tensor,
    norm_weight: torch.Tensor,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    output: torch.Tensor | None = None,
    *,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    t1_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fused_kda_decode` for the tokens of a draft, whose states and inputs are kept one by one.

    Parameters
    ----------
    x, weight, raw_gate, raw_beta, A_log, dt_bias, state, output_gate, norm_weight, lower_bound, \
norm_eps, output
        As for `fused_kda_decode`, with the tokens of all sequences one after the other in place of
        the batch.
    conv_state : torch.Tensor
        ``[slots, 3 * heads * head_dim, T + 2]``, dtype of `x`, any strides; overwritten. A
        sequence's history begins at ``num_accepted_tokens - 1``; the call leaves its last two
        inputs in front and the new ones after them.
    state_indices : torch.Tensor
        ``[sequences, T]``, int32 or int64; T is the most tokens of a sequence. Token t leaves the
        state in slot ``[n, t]``; slot ``[n, 0]`` is that of `conv_state`. One that is not positive
        is not written; if it is the one to read, or the first, the sequence is padding.
    query_start_loc : torch.Tensor
        ``[sequences + 1]``, int32 or int64: where sequences begin in the packed tokens, ascending
        from 0. Tokens after the last sequence have the output zero.
    num_accepted_tokens : torch.Tensor
        ``[sequences]``, int32, from 1 to T: how many tokens of the last call count; the state is
        read from slot ``[n, num_accepted_tokens - 1]``.
    t1_state_indices
        Not supported: None.

    Returns
    -------
    torch.Tensor
        `output`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    refuse_unsupported(t1_state_indices=t1_state_indices)
    slots = check_slots("state_indices", state_indices, 2)
    starts = check_slots("query_start_loc", query_start_loc, 1)
    accepted = check_slots("num_accepted_tokens", num_accepted_tokens, 1)
    if len(starts) != len(slots) + 1 or len(accepted) != len(slots) or slots.shape[1] == 0:
        raise ValueError(
            "`query_start_loc`, `num_accepted_tokens` and `state_indices` must have shapes "
            f"[sequences + 1], [sequences] and [sequences, T], got {list(starts.shape)}, "
            f"{list(accepted.shape)} and {list(slots.shape)}"
        )
    layer = Layer(x, weight, conv_state, raw_gate, raw_beta, state, output_gate, norm_weight)
    return _decode_layer(
        layer, (A_log, dt_bias, lower_bound), slots, starts, accepted, norm_eps, output
    )


def _decode_layer(
    layer: Layer,
    gate: tuple[torch.Tensor, torch.Tensor, float | None],
    slots: torch.Tensor,
    starts: torch.Tensor,
    accepted: torch.Tensor | None,
    norm_eps: float,
    output: torch.Tensor | None,
) -> torch.Tensor:
    """Both functions: packed tokens from `starts`, with ``[sequences, T]`` slots."""
    drafted = slots.shape[1] - 1
    layer.check(drafted + WIDTH - 1)
    A_log, dt_bias, lower_bound = gate
    norm_eps = check_number("norm_eps", norm_eps)
    heads, dim = layer.state.shape[1:3]
    if check_tensor("dt_bias", dt_bias, 1, 2).numel() != heads * dim:
        raise ValueError(f"`dt_bias` must have {heads} x {dim} elements, got {list(dt_bias.shape)}")
    out = destination("output", output, (1, len(layer.x), heads, dim), layer.x)
    skipped = torch.zeros_like(slots[:, 0]) if accepted is None else accepted - 1
    skipped = skipped.clamp(0, drafted).long()
    known = (slots > 0) & (slots < len(layer.state))
    live = known[:, 0] & known.gather(1, skipped[:, None])[:, 0]
    live &= slots[:, 0] < len(layer.conv_state)
    history = History(layer.conv_state, slots[:, 0], live, starts, skipped)
    (q, k, v), move_on = layer.convolved(history)
    of_tokens = torch.where(live[:, None] & known, slots, -1)
    with named(initial_state="state", output_state="state", g="raw_gate", beta="raw_beta"):
        core, *_ = recurrent_kda(
            q, k, v, layer.raw_gate, layer.raw_beta, A_log, dt_bias.reshape(heads, dim),
            initial_state=layer.state,
            use_gate_in_kernel=True,
            lower_bound=lower_bound,
            cu_seqlens=starts,
            ssm_state_indices=of_tokens if drafted else of_tokens[:, 0],
            num_spec_tokens=drafted or None,
            num_accepted_tokens=accepted if drafted else None,
            output=torch.zeros_like(v, memory_format=torch.contiguous_format),
            beta_is_logit=True,
        )  # fmt: skip
    move_on()
    return out.copy_(layer.normed(core, norm_eps))
