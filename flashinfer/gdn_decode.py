"""Decode of the gated delta rule: gates, norms and the state's update in one kernel.

Per value head, with the state ``S`` of ``[head_dim_v, head_dim_k]``::

    decay = exp(-exp(A_log) * softplus(a + dt_bias));  beta = sigmoid(b)
    S = decay * S;  S = S + beta * (v - S k) k^T;  out = scale * S q

`q` and `k` are divided by their norms first where `use_qk_l2norm` is set. All arithmetic is in
float32; the state is read once and written once, whatever the number of tokens.

Source: S. Yang, J. Kautz and A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta
Rule", 2024.
"""

import torch

from ._common.checks import count as check_count
from ._common.checks import flag as check_flag
from ._common.checks import named
from ._common.checks import optional_flag as check_optional_flag
from ._common.checks import tensor as check_tensor
from ._instrument.decorator import flashinfer_api
from ._linear_attention.checks import (
    check_backend,
    check_flags,
    check_one_of,
    check_shapes,
    check_slots,
    destination,
)
from ._linear_attention.decode import run_decode
from ._linear_attention.replay import Windows, check_sequences, commit_accepted, present_slots
from ._linear_attention.short_convolution import History, convolve
from .trace.templates.gated_delta_rule import gated_delta_rule_decode_pretranspose_trace
from .trace.templates.gated_delta_rule_key_major import gated_delta_rule_decode_trace
from .trace.templates.gdn_fused import gdn_fused_decode_step_trace
from .trace.templates.gdn_replay import (
    gated_delta_rule_mtp_replayssm_trace,
    gated_delta_rule_replayssm_commit_trace,
)

__all__ = [
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "gated_delta_rule_replayssm_commit",
    "gdn_fused_decode_step",
    "gdn_fused_decode_step_supported",
]


@flashinfer_api(trace=gated_delta_rule_decode_trace)
def gated_delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One or several tokens of each sequence; the state's last dimension is the value's.

    Parameters
    ----------
    q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, backend
        As for `gated_delta_rule_decode_pretranspose`; `head_dim_v` is a multiple of 8.
    state : torch.Tensor
        ``[batch, v_heads, head_dim_k, head_dim_v]``, float32, bfloat16 or float16, overwritten.

    Returns
    -------
    tuple of torch.Tensor
        `output` and `state`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    check_backend(backend, "auto", "flashinfer")
    check_flag("use_qk_l2norm", use_qk_l2norm)
    with named(initial_state="state", output_state="state"):
        out = run_decode(
            q, k, v, check_tensor("state", state, 4), (A_log, a, dt_bias, b), scale, output,
            normalize_qk=use_qk_l2norm,
            frozen=False,
            key_major=True,
        )  # fmt: skip
    return out, state


@flashinfer_api(trace=gated_delta_rule_decode_pretranspose_trace)
def gated_delta_rule_decode_pretranspose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One or several tokens of each sequence; the state's last dimension is the key's.

    Parameters
    ----------
    q, k : torch.Tensor
        ``[batch, tokens, heads, head_dim_k]``, float16 or bfloat16; the last dimension is
        contiguous, and rows start at multiples of 16 bytes. `head_dim_k` is 32, 64, 128 or 256.
    v : torch.Tensor
        ``[batch, tokens, v_heads, head_dim_v]``, dtype of `q`; `v_heads` is a multiple of `heads`,
        and consecutive value heads share a query head.
    state : torch.Tensor or None
        ``[batch, v_heads, head_dim_v, head_dim_k]``, float32, bfloat16 or float16, overwritten.
        None where `initial_state` is given.
    A_log : torch.Tensor
        ``[v_heads]``, float32.
    a, b : torch.Tensor
        ``[batch, tokens, v_heads]``: inputs of the decay and of the learning rate.
    dt_bias : torch.Tensor
        ``[v_heads]``, added to `a`.
    scale : float, optional
        Factor of the output; by default ``1 / sqrt(head_dim_k)``.
    output : torch.Tensor, optional
        Result, shape and dtype of `v`.
    use_qk_l2norm : bool
        Divide `q` and `k` by their Euclidean norms (with 1e-6 under the root).
    initial_state : torch.Tensor, optional
        Pool ``[slots, v_heads, head_dim_v, head_dim_k]`` in place of `state`. Slots and heads may
        be strided; each head's matrix is contiguous.
    initial_state_indices, output_state_indices : torch.Tensor, optional
        ``[batch]``, int32 or int64: the slots that sequences read and write; by default sequence i
        has slot i, and the slot that is read is written. Slots that are written must be distinct.
        A sequence with a slot to read that the pool has not (a negative one, say) is padding: its
        output is zero and no state is touched. Such a slot to write: the state is not written.
    intermediate_states_buffer : torch.Tensor, optional
        ``[>= batch, >= tokens, v_heads, head_dim_v, head_dim_k]``, dtype of the state: receives
        the state after every token.
    disable_state_update : bool
        Leave the state as it is.
    backend : str
        "auto" or "flashinfer".

    Returns
    -------
    tuple of torch.Tensor
        `output` and the state or pool.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    check_backend(backend, "auto", "flashinfer")
    check_flags(use_qk_l2norm=use_qk_l2norm, disable_state_update=disable_state_update)
    check_one_of(state=state, initial_state=initial_state)
    if initial_state is None:
        for name, indices in (
            ("initial_state_indices", initial_state_indices),
            ("output_state_indices", output_state_indices),
        ):
            if indices is not None:
                raise ValueError(f"`{name}` needs `initial_state`")
    name, given = ("initial_state", initial_state) if state is None else ("state", state)
    pool = check_tensor(name, given, 4)
    with named(initial_state=name, output_state=name):
        out = run_decode(
            q, k, v, pool, (A_log, a, dt_bias, b), scale, output,
            normalize_qk=use_qk_l2norm,
            frozen=disable_state_update,
            read_slots=initial_state_indices,
            write_slots=output_state_indices,
            intermediate=intermediate_states_buffer,
        )  # fmt: skip
    return out, pool


@flashinfer_api(trace=gated_delta_rule_mtp_replayssm_trace)
def gated_delta_rule_mtp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: torch.Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: torch.Tensor | None = None,
    replayssm_rawk: torch.Tensor | None = None,
    replayssm_g: torch.Tensor | None = None,
    replayssm_beta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Several tokens of each sequence, to verify a draft: by default the states stay as they are.

    Parameters
    ----------
    q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm
        As for `gated_delta_rule_decode_pretranspose`.
    initial_state, initial_state_indices, output_state_indices, intermediate_states_buffer
        As there.
    ssm_state_indices : torch.Tensor, optional
        ``[batch, >= tokens]``, int32 or int64: slots of the pool that receive the state after each
        token, in place of `intermediate_states_buffer`, but for slots that the pool has not. States
        are written to these alone.
    disable_state_update : bool, optional
        Leave `initial_state` as it is; None is True.
    cache_replayssm : bool
        Keep the inputs of the draft, which needs the four windows and leaves `initial_state` as it
        is; `gated_delta_rule_replayssm_commit` walks those that count.
    replayssm_rawv, replayssm_rawk : torch.Tensor, optional
        ``[slots, v_heads, >= tokens, head_dim_v]`` and ``[slots, heads, >= tokens, head_dim_k]``,
        dtype of `q`: receive values and keys, in the slots that are read.
    replayssm_g, replayssm_beta : torch.Tensor, optional
        ``[slots, v_heads, >= tokens]``, float32: receive logarithms of the decay, learning rates.

    Returns
    -------
    tuple of torch.Tensor
        `output` and `initial_state`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    check_flag("use_qk_l2norm", use_qk_l2norm)
    check_optional_flag("disable_state_update", disable_state_update)
    frozen = disable_state_update is None or disable_state_update
    windows = _windows((replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta),
                       cache_replayssm, frozen and ssm_state_indices is None, q)  # fmt: skip
    out = run_decode(
        q, k, v, check_tensor("initial_state", initial_state, 4), (A_log, a, dt_bias, b), scale,
        output,
        normalize_qk=use_qk_l2norm,
        frozen=frozen,
        read_slots=initial_state_indices,
        write_slots=output_state_indices,
        token_slots=ssm_state_indices,
        intermediate=intermediate_states_buffer,
    )  # fmt: skip
    if windows is not None:
        windows.keep(k, v, (A_log, a, dt_bias, b), initial_state_indices)
    return out, initial_state


def _windows(
    given: tuple[torch.Tensor | None, ...], wanted: bool, frozen: bool, q: torch.Tensor
) -> Windows | None:
    """Where a draft's inputs are kept; None if they are not."""
    names = [f"replayssm_{field}" for field in Windows._fields]
    absent = [name for name, tensor in zip(names, given, strict=True) if tensor is None]
    if not check_flag("cache_replayssm", wanted):
        if len(absent) < len(names):
            raise ValueError("`replayssm_*` need `cache_replayssm=True`")
        return None
    if not frozen:
        raise ValueError(
            "`cache_replayssm` needs `disable_state_update=True` and no slots of tokens"
        )
    rawv, rawk, g, beta = (check_tensor(*pair) for pair in zip(names, given, strict=True))
    windows = Windows(rawv, rawk, g, beta)
    windows.check("replayssm_{}", check_tensor("q", q, 4).dtype)
    if rawv.shape[2] < q.shape[1]:
        raise ValueError(
            f"`replayssm_rawv` must hold at least {q.shape[1]} tokens, got shape {list(rawv.shape)}"
        )
    return windows


@flashinfer_api(trace=gated_delta_rule_replayssm_commit_trace)
def gated_delta_rule_replayssm_commit(
    checkpoint_state: torch.Tensor,
    rawv_cache: torch.Tensor,
    rawk_cache: torch.Tensor,
    g_cache: torch.Tensor,
    beta_cache: torch.Tensor,
    state_indices: torch.Tensor,
    accept_lens: torch.Tensor,
    *,
    track_state_indices: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    null_block_id: int = -1,
    backend: str = "auto",
) -> None:
    """Bring states to the last accepted token of drafts whose inputs were kept, in all layers.

    The windows are those that `gated_delta_rule_mtp` has written with `cache_replayssm`.

    Parameters
    ----------
    checkpoint_state : torch.Tensor
        ``[layers, slots, v_heads, head_dim_v, head_dim_k]``, float32, bfloat16 or float16,
        contiguous; overwritten.
    rawv_cache, rawk_cache : torch.Tensor
        ``[layers, slots, v_heads, T, head_dim_v]`` and ``[layers, slots, heads, T, head_dim_k]``,
        float16 or bfloat16; `head_dim_k` is 32, 64, 128 or 256.
    g_cache, beta_cache : torch.Tensor
        ``[layers, slots, v_heads, T]``, float32.
    state_indices : torch.Tensor
        ``[batch]``, int32 or int64: the slot of each sequence, distinct. One that there is
        not (a negative one, say) and `null_block_id` are padding.
    accept_lens : torch.Tensor
        ``[batch]``, int32 or int64: how many tokens count, up to T; 0 leaves the state as it is.
    track_state_indices, track_steps : torch.Tensor, optional
        ``[batch]``, int32 or int64: slots that receive the state after token `track_steps` (from
        0; negative: none). They are no slots of `state_indices`.
    use_qk_l2norm : bool
        As in the call that wrote the windows.
    null_block_id : int
        A slot that is padding as well.
    backend : str
        "auto" or "simt", which are the same here: sums are float32.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    check_backend(backend, "auto", "simt")
    check_flag("use_qk_l2norm", use_qk_l2norm)
    pool = check_tensor("checkpoint_state", checkpoint_state, 5)
    if not pool.is_contiguous():
        raise ValueError("`checkpoint_state` must be contiguous")
    v = check_tensor("rawv_cache", rawv_cache, 5)
    windows = Windows(v, rawk_cache, g_cache, beta_cache)
    windows.check("{}_cache", v.dtype)
    layers, slots, heads = v.shape[:3]
    shape = (layers, slots, heads, v.shape[4], rawk_cache.shape[4])
    check_shapes(checkpoint_state=(pool, shape))
    count = len(check_slots("state_indices", state_indices, 1))
    null = check_count("null_block_id", null_block_id, -(2**31))
    own = present_slots(check_sequences("state_indices", state_indices, count), null, slots)
    accepted = check_sequences("accept_lens", accept_lens, count)
    if (track_state_indices is None) != (track_steps is None):
        raise ValueError("`track_state_indices` and `track_steps` belong together")
    if track_state_indices is not None and track_steps is not None:
        targets = check_sequences("track_state_indices", track_state_indices, count)
        targets = present_slots(targets, null, slots)
        steps = check_sequences("track_steps", track_steps, count)
        commit_accepted(pool, windows, own, steps + 1, targets, use_qk_l2norm)
    commit_accepted(pool, windows, own, accepted, own, use_qk_l2norm)


@flashinfer_api(trace=gdn_fused_decode_step_trace)
def gdn_fused_decode_step(
    hidden_states: torch.Tensor,
    w_ba: torch.Tensor,
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    conv_state: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float | None,
    ssm_state: torch.Tensor,
    state_indices: torch.Tensor,
    use_qk_l2norm: bool = True,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One decode step of a layer: projection of the gates, convolution, SiLU and delta rule.

    The recurrence is a kernel; what is before it is made of PyTorch's operations, so that it saves
    code and no time: `gdn_fused_decode_step_supported` is False.

    Parameters
    ----------
    hidden_states : torch.Tensor
        ``[batch, hidden_size]``, float16 or bfloat16: the layer's input.
    w_ba : torch.Tensor
        ``[hidden_size, 2 * v_heads]``, the same dtype: columns of `b`, then those of `a` of
        `gated_delta_rule_decode_pretranspose`.
    mixed_qkv : torch.Tensor
        ``[batch, (2 * heads + v_heads) * head_dim]``, the same dtype: queries of all heads, keys
        and values, before the convolution. `head_dim` is 32, 64, 128 or 256.
    conv_weight, conv_bias : torch.Tensor
        ``[channels, width]``, the tap of the token itself last, and ``[channels]``; floating point.
    conv_state : torch.Tensor
        ``[slots, channels, width - 1]``, dtype of `mixed_qkv`, any strides: the last inputs of each
        sequence, the newest last; overwritten.
    A_log, dt_bias, scale, use_qk_l2norm
        As for `gated_delta_rule_decode_pretranspose`.
    ssm_state : torch.Tensor
        ``[slots, v_heads, head_dim, head_dim]``, key dimension last, float32, bfloat16 or float16;
        overwritten.
    state_indices : torch.Tensor
        ``[batch]``, int32 or int64: the slot of each sequence in both pools, distinct; one that
        they have not: padding, whose output is zero, and no slot is touched.
    out : torch.Tensor, optional
        Result, ``[batch, 1, v_heads, head_dim]``, dtype of `mixed_qkv`.

    Returns
    -------
    tuple of torch.Tensor
        `out`, `conv_state` and `ssm_state`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    heads, dim = check_tensor("ssm_state", ssm_state, 4).shape[1:3]
    batch, channels = check_tensor("mixed_qkv", mixed_qkv, 2).shape
    slots = check_slots("state_indices", state_indices, 1)
    width = check_tensor("conv_weight", conv_weight, 2).shape[1]
    keys, rest = divmod(channels - heads * dim, 2 * dim)
    if keys < 1 or rest != 0 or width < 1:
        raise ValueError(
            f"`mixed_qkv` must have (2 heads + {heads}) x {dim} columns, got {channels}"
        )
    hidden = check_tensor("hidden_states", hidden_states, 2).shape[1]
    check_shapes(
        hidden_states=(hidden_states, (batch, hidden)),
        w_ba=(w_ba, (hidden, 2 * heads)),
        conv_weight=(conv_weight, (channels, width)),
        conv_bias=(conv_bias, (channels,)),
        conv_state=(conv_state, (None, channels, width - 1)),
        state_indices=(slots, (batch,)),
    )
    for name, tensor in (
        ("hidden_states", hidden_states),
        ("w_ba", w_ba),
        ("conv_state", conv_state),
    ):
        if tensor.dtype != mixed_qkv.dtype:
            raise ValueError(f"`{name}` must have dtype {mixed_qkv.dtype}, got {tensor.dtype}")
    out = destination("out", out, (batch, 1, heads, dim), mixed_qkv)
    b, a = (hidden_states @ w_ba)[:, None].split(heads, dim=2)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=slots.device)
    live = (slots >= 0) & (slots < min(len(conv_state), len(ssm_state)))
    history = History(conv_state, slots, live, starts, torch.zeros_like(slots).long())
    mixed, move_on = convolve(mixed_qkv, conv_weight, history, conv_bias)
    mixed = mixed.to(mixed_qkv.dtype).view(batch, 1, -1, dim)
    q, k, v = mixed.split([keys, keys, heads], dim=2)
    with named(initial_state="ssm_state", output_state="ssm_state", output="out"):
        gated_delta_rule_mtp(
            q, k, v, ssm_state, torch.where(live, slots, -1), A_log, a, dt_bias, b, scale, out,
            disable_state_update=False,
            use_qk_l2norm=use_qk_l2norm,
        )  # fmt: skip
    move_on()
    return out, conv_state, ssm_state


def gdn_fused_decode_step_supported(
    batch_size: int,
    hidden_size: int = 5120,
    n_ba: int = 96,
    qkv_dim: int = 10240,
    num_qk_heads: int = 16,
    num_v_heads: int = 48,
    head_dim: int = 128,
    conv_width: int = 4,
    conv_state_len: int = 3,
    device: torch.device | None = None,
    conv_state_layout: str = "SD",
) -> bool:
    """Whether one kernel runs `gdn_fused_decode_step` for a layer of these sizes.

    Parameters
    ----------
    batch_size, hidden_size, n_ba, qkv_dim, num_qk_heads, num_v_heads, head_dim, conv_width, \
conv_state_len, device, conv_state_layout
        Sizes of a layer, and where its tensors are.

    Returns
    -------
    bool
        False: a caller's own composition is as good.
    """
    return False
