"""Attention over ragged keys and values in one call: ``trtllm_ragged_attention_deepseek``.

The kernels are those of ``BatchPrefillWithRaggedKVCacheWrapper``, planned in the call.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..._common.checks import tensor as check_tensor
from ..._instrument.decorator import flashinfer_api
from ...jit.attention.config import FLOAT16
from ...trace.templates.attention_arguments import gather_ragged
from ...trace.templates.block_tables import one_call_ragged_trace
from ..checks import BLACKWELL, refuse
from ..index_tensors import check_index_vector, host_indices
from ..wrappers.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper
from .gather import gather_planned, predict_ragged
from .plan_block_tables import PlannedCall, Scale, logits_scale, one_number


def _gathered(call: Mapping[str, Any]) -> dict[str, Any]:
    return gather_planned(_plan, trtllm_ragged_attention_deepseek, call, gather_ragged)


@flashinfer_api(
    trace=one_call_ragged_trace(name="trtllm_ragged", gather=_gathered, predict=predict_ragged)
)
def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sage_attn_sfs: tuple[torch.Tensor | None, ...] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, ...] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: torch.Tensor | None = None,
    kv_seq_lens_cpu: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Prefill of latent attention with keys and values that were projected, in one call.

    Parameters
    ----------
    query : torch.Tensor
        ``[cum_seq_lens_q[-1], num_heads, 192]``: 128 columns of a head, and 64 rotary ones; other
        head sizes and dtypes are those of ``BatchPrefillWithRaggedKVCacheWrapper``.
    key, value : torch.Tensor
        ``[cum_seq_lens_kv[-1], num_kv_heads, 192]`` and ``[..., 128]``.
    workspace_buffer : torch.Tensor
        For the plan and partial results, as the wrapper's.
    seq_lens : torch.Tensor
        ``[batch_size]`` int32: KV tokens of each request; `cum_seq_lens_kv` says it already.
    max_q_len, max_kv_len : int
        At least the largest numbers of query tokens and of KV tokens.
    bmm1_scale, bmm2_scale : float or torch.Tensor
        Factors of the logits and of the output; a tensor is one float32.
    o_sf_scale : float
        A factor of 4-bit outputs, which there are not: it changes nothing.
    batch_size : int
        Requests.
    window_left : int
        How many keys before its own position a query sees; -1: all.
    cum_seq_lens_q, cum_seq_lens_kv : torch.Tensor
        ``[batch_size + 1]`` int32: rows of each request. The plan reads them, so on the GPU they
        are waited for, unless `q_seq_lens_cpu` and `kv_seq_lens_cpu` are given.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the device has it.
    is_causal : bool
        Query i of n sees keys up to ``i + kv_len - n``.
    return_lse : bool
        Return log-sum-exps as well, with which `flashinfer.merge_state` merges chunks.
    attention_sinks : torch.Tensor, optional
        ``[num_heads]`` float32: a logit per head that takes part in the softmax without a value.
        Log-sum-exps contain it.
    out : torch.Tensor, optional
        Where the output goes: ``[tokens, num_heads, 128]``, float16 or bfloat16.
    lse : torch.Tensor, optional
        Where log-sum-exps go: ``[tokens, num_heads]`` float32, base 2.
    backend : str
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``; ``"trtllm-gen"``, the default, is the first.
    q_seq_lens_cpu, kv_seq_lens_cpu : torch.Tensor, optional
        ``[batch_size]`` on the host: query and KV tokens of each request.
    skip_all_rows_active_check : bool
        A request without KV tokens gives zeros and minus infinity either way.
    skip_softmax_threshold_scale_factor, sage_attn_sfs, num_elts_per_sage_attn_blk, \
use_fp16_softmax, uses_spcompress
        Must be left out: of kernels that there are not.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The output and, with `return_lse`, log-sum-exps.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or lengths are on the GPU while a graph is captured.
    """
    return _plan(locals())()


def _plan(call: Mapping[str, Any]) -> PlannedCall:
    """The call by the names of its arguments."""
    absent = ("skip_softmax_threshold_scale_factor", "use_fp16_softmax", "uses_spcompress")
    refuse(
        BLACKWELL,
        **{name: call[name] for name in absent},
        sage_attn_sfs=next((x for x in call["sage_attn_sfs"] if x is not None), None),
        num_elts_per_sage_attn_blk=next((x for x in call["num_elts_per_sage_attn_blk"] if x), None),
    )
    check_flag("skip_all_rows_active_check", call["skip_all_rows_active_check"])
    query, key, value = (check_tensor(name, call[name], 3) for name in ("query", "key", "value"))
    batch_size = call["batch_size"]
    check_index_vector("seq_lens", call["seq_lens"])
    if len(call["seq_lens"]) != batch_size:
        raise ValueError(
            f"`seq_lens` must have `batch_size` {batch_size} elements, got {len(call['seq_lens'])}"
        )
    rows_q, rows_kv = (
        _host_rows(f"cum_seq_lens_{x}", call[f"cum_seq_lens_{x}"], name, call[name])
        for x, name in (("q", "q_seq_lens_cpu"), ("kv", "kv_seq_lens_cpu"))
    )
    for name, rows in (("max_q_len", rows_q), ("max_kv_len", rows_kv)):
        if len(rows) != batch_size + 1:
            raise ValueError(
                f"`batch_size` must be {len(rows) - 1} by the lengths, got {batch_size}"
            )
        check_count(name, call[name], int(rows.diff().max()) if batch_size else 0)
    sinks = call["attention_sinks"]
    if sinks is not None:
        check_tensor("attention_sinks", sinks, 1)
        if sinks.dtype != torch.float32 or len(sinks) != query.shape[1]:
            raise ValueError(
                f"`attention_sinks` must be float32 [{query.shape[1]}], got {sinks.dtype} "
                f"{list(sinks.shape)}"
            )
    plan_scale, q_scale = logits_scale(call["bmm1_scale"])
    backend = "auto" if call["backend"] == "trtllm-gen" else call["backend"]
    workspace = call["workspace_buffer"]
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
    wrapper.plan(
        rows_q,
        rows_kv,
        query.shape[1],
        key.shape[1],
        query.shape[2],
        head_dim_vo=value.shape[2],
        causal=check_flag("is_causal", call["is_causal"]),
        window_left=call["window_left"],
        sm_scale=plan_scale,
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
        o_data_type=_output_dtype(query, call["out"]),
    )
    run = {
        **{"q": query, "k": key, "v": value, "q_scale": q_scale},
        "v_scale": one_number("bmm2_scale", call["bmm2_scale"]),
        "sinks": sinks,
        **{name: call[name] for name in ("out", "lse", "return_lse", "enable_pdl")},
    }
    return PlannedCall(wrapper, run)


def _output_dtype(query: torch.Tensor, out: torch.Tensor | None) -> torch.dtype:
    if out is not None:
        if check_tensor("out", out, 3).dtype not in FLOAT16:
            raise ValueError(f"`out` must be float16 or bfloat16, got {out.dtype}")
        return out.dtype
    return torch.bfloat16 if query.dtype.itemsize == 1 else query.dtype


def _host_rows(
    name: str, rows: torch.Tensor, lengths_name: str, lengths: torch.Tensor | None
) -> torch.Tensor:
    """Where requests begin, on the host: from lengths that are there, or by one copy."""
    check_index_vector(name, rows)
    if lengths is not None:
        check_index_vector(lengths_name, lengths)
        if lengths.is_cuda:
            raise ValueError(f"`{lengths_name}` must be on the host, got {lengths.device}")
        counted = lengths.to(torch.int32)
        return torch.cat([counted.new_zeros(1), counted.cumsum(0, dtype=torch.int32)])
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"`{lengths_name}` must be given while a CUDA graph is captured: the plan reads it"
        )
    return host_indices({name: rows})[0]
