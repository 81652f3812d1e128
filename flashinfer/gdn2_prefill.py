"""Prefill of Gated DeltaNet-2: the delta rule with gates by channel."""

import torch

from ._common.checks import tensor as check_tensor
from ._instrument.decorator import flashinfer_api
from ._linear_attention.by_channel import run_by_channel
from ._linear_attention.channel_gates import scale_by_channel
from ._linear_attention.checks import (
    check_backend,
    check_flags,
    check_shapes,
    check_slots,
    count_sequences,
    destination,
    resolve_scale,
)
from ._linear_attention.delta_rule import GateForm, Gates, States
from .trace.templates.gdn2 import chunk_gated_delta_rule2_trace

__all__ = ["chunk_gated_delta_rule2"]


@flashinfer_api(trace=chunk_gated_delta_rule2_trace)
def chunk_gated_delta_rule2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    w: torch.Tensor | None = None,
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
    """Gated delta rule with a decay and an erase gate by key channel and a write gate by value's.

    Per state head and token: ``S = S diag(exp(g)); S += (w v - S (beta k)) k^T; output = scale S
    q``, with S of ``[head_dim_v, head_dim_k]``. Queries, keys and values are scaled before, and
    rounded to the type of `q` once more; then the kernels of `flashinfer.kda.recurrent_kda` walk
    the tokens, those of prompts in chunks but for float16 with erase gates.

    Parameters
    ----------
    q, k : torch.Tensor
        ``[tokens, heads, head_dim_k]``, float16 or bfloat16: the tokens of all sequences one after
        the other. `head_dim_k` is 32, 64, 128 or 256.
    v : torch.Tensor
        ``[tokens, v_heads, head_dim_v]``, dtype of `q`. There are ``max(heads, v_heads)`` state
        heads; both numbers divide that, and consecutive state heads share a head.
    g : torch.Tensor, optional
        ``[tokens, state_heads, head_dim_k]``, floating point: the decay's logarithm; 0 if None.
    beta : torch.Tensor, optional
        ``[tokens, state_heads, head_dim_k]``, floating point, not negative: the erase gate; 1 if
        None.
    w : torch.Tensor, optional
        ``[tokens, state_heads, head_dim_v]``, floating point: the write gate; 1 if None.
    scale : float, optional
        Factor of the output; by default ``1 / sqrt(head_dim_k)``.
    initial_state : torch.Tensor, optional
        ``[sequences, state_heads, head_dim_v, head_dim_k]``, float32, bfloat16 or float16; zeros if
        None.
    output_final_state : bool
        Return the states after each sequence's last token as well.
    cu_seqlens : torch.Tensor
        ``[sequences + 1]``, int64 or int32: where sequences begin, from 0 to the number of tokens,
        ascending. Required.
    use_qk_l2norm_in_kernel : bool
        Divide `q` and `k` by their Euclidean norms (with 1e-6 under the root).
    output : torch.Tensor, optional
        Result, ``[tokens, state_heads, head_dim_v]``, dtype of `q`.
    output_state : torch.Tensor, optional
        Final states, the shape of `initial_state` and its dtype (float32 without one). It may be
        `initial_state` itself.
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
    NVIDIA, "Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention".
    """
    check_backend(backend, "auto")
    check_flags(
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )
    tokens, q_heads, dim_k = check_tensor("q", q, 3).shape
    _, v_heads, dim_v = check_tensor("v", v, 3).shape
    heads = max(q_heads, v_heads)
    bounds = check_slots("cu_seqlens", cu_seqlens, 1)
    sequences = count_sequences(bounds)
    check_shapes(
        k=(k, (tokens, q_heads, dim_k)),
        v=(v, (tokens, v_heads, dim_v)),
        **{
            name: (gate, (tokens, heads, dim))
            for name, gate, dim in (("g", g, dim_k), ("beta", beta, dim_k), ("w", w, dim_v))
            if gate is not None
        },
    )
    _check_types(q, k, v, heads)
    shape = (sequences, heads, dim_v, dim_k)
    if initial_state is not None:
        check_shapes(initial_state=(initial_state, shape))
    if output_state is not None and not output_final_state:
        raise ValueError("`output_state` needs `output_final_state=True`")
    like = torch.empty(0, device=q.device) if initial_state is None else initial_state
    final = destination("output_state", output_state, shape, like) if output_final_state else None
    out = destination("output", output, (tokens, heads, dim_v), q)
    operands = scale_by_channel(q, k, v, g, beta, w, bounds, heads, use_qk_l2norm_in_kernel)
    states = States(
        None if initial_state is None else initial_state.float(),
        None if final is None else torch.empty(shape, dtype=torch.float32, device=q.device),
    )
    run_by_channel(
        out[None],
        operands.q[None],
        operands.k[None],
        operands.v[None],
        Gates(operands.log_decay[None], None, GateForm.LOG, by_channel=True),
        states,
        scale=resolve_scale(scale, dim_k),
        normalize_qk=False,
        cu_seqlens=bounds,
        may_grow=beta is not None,
    )
    if final is None or states.final is None:
        return out
    return out, final.copy_(states.final * operands.undo)


def _check_types(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> None:
    """Refuse types that differ, and heads that do not share state heads."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.dtype != q.dtype:
            raise ValueError(f"`{name}` must be float16 or bfloat16, as `q` is, got {tensor.dtype}")
        if tensor.shape[1] == 0 or heads % tensor.shape[1] != 0:
            raise ValueError(
                f"`{name}` must have a number of heads that divides {heads}, got {tensor.shape[1]}"
            )
