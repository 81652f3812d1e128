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

from ._common.checks import tensor as check_tensor
from ._instrument.decorator import flashinfer_api
from ._linear_attention.checks import check_backend, check_one_of
from ._linear_attention.decode import run_decode
from .trace.templates.gated_delta_rule import (
    gated_delta_rule_decode_pretranspose_trace,
    gated_delta_rule_mtp_trace,
)
from .trace.templates.gated_delta_rule_key_major import gated_delta_rule_decode_trace

__all__ = [
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
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
        A sequence with a negative slot to read is padding: its output is zero and no state is
        touched. A negative slot to write: the state is not written.
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
    check_one_of(state=state, initial_state=initial_state)
    if initial_state is None:
        for name, indices in (
            ("initial_state_indices", initial_state_indices),
            ("output_state_indices", output_state_indices),
        ):
            if indices is not None:
                raise ValueError(f"`{name}` needs `initial_state`")
    pool = check_tensor("initial_state", initial_state, 4) if state is None else state
    out = run_decode(
        q, k, v, check_tensor("state", pool, 4), (A_log, a, dt_bias, b), scale, output,
        normalize_qk=use_qk_l2norm,
        frozen=disable_state_update,
        read_slots=initial_state_indices,
        write_slots=output_state_indices,
        intermediate=intermediate_states_buffer,
    )  # fmt: skip
    return out, pool


@flashinfer_api(trace=gated_delta_rule_mtp_trace)
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
        token, in place of `intermediate_states_buffer`; a negative slot receives nothing. States
        are written to these alone.
    disable_state_update : bool, optional
        Leave `initial_state` as it is; None is True.
    cache_replayssm, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta
        Not supported: False and None.

    Returns
    -------
    tuple of torch.Tensor
        `output` and `initial_state`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    replay = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    if cache_replayssm or any(tensor is not None for tensor in replay):
        raise ValueError("`cache_replayssm` must be False and its tensors None: not supported")
    out = run_decode(
        q, k, v, check_tensor("initial_state", initial_state, 4), (A_log, a, dt_bias, b), scale,
        output,
        normalize_qk=use_qk_l2norm,
        frozen=disable_state_update is None or disable_state_update,
        read_slots=initial_state_indices,
        write_slots=output_state_indices,
        token_slots=ssm_state_indices,
        intermediate=intermediate_states_buffer,
    )  # fmt: skip
    return out, initial_state
