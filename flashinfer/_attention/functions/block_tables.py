"""Attention with pages by block tables: ``trtllm_batch_*_with_kv_cache``, for engines that import
them.

The kernels are those of ``BatchPrefillWithPagedKVCacheWrapper``, planned in the call.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..._instrument.decorator import flashinfer_api
from ...trace.templates.block_tables import block_table_trace
from .gather import gather_planned, predict_block_tables
from .plan_block_tables import Cache, Scale, plan_context, plan_decode


def _gathered_decode(call: Mapping[str, Any]) -> dict[str, Any]:
    return gather_planned(
        partial(plan_decode, on_host=True), trtllm_batch_decode_with_kv_cache, call
    )


def _gathered_context(call: Mapping[str, Any]) -> dict[str, Any]:
    return gather_planned(
        partial(plan_context, on_host=True), trtllm_batch_context_with_kv_cache, call
    )


@flashinfer_api(
    trace=block_table_trace(
        name="trtllm_decode", gather=_gathered_decode, predict=predict_block_tables
    )
)
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: torch.Tensor | None = None,
    request_order_plan: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Decode attention of a batch, planned and run in one call.

    With `seq_lens` on the GPU and at most 16 query tokens a request, the work is divided there: the
    host waits for nothing, and a captured graph follows the lengths that it finds. With more than
    16 query rows of a KV head and request that takes a kernel, which a wrapper that is planned once
    a step spares in each layer. Otherwise the lengths are fetched.

    Parameters
    ----------
    query : torch.Tensor
        ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``, or as `cum_seq_lens_q` says.
    kv_cache : torch.Tensor or tuple of torch.Tensor
        Keys and values, each ``[num_pages, num_kv_heads, page_size, head_dim]`` (``"HND"``) or
        ``[num_pages, page_size, num_kv_heads, head_dim]`` (``"NHD"``), or one tensor with a
        dimension of 2 after the first, or of 1 where keys are values, too; dtypes and strides as
        for ``BatchPrefillWithPagedKVCacheWrapper.run``.
    workspace_buffer : torch.Tensor
        For partial results of requests that are split; contiguous, any dtype.
    block_tables : torch.Tensor
        ``[batch_size, max_pages]`` int32 or int64: page numbers of each request. Entries beyond its
        length are not read.
    seq_lens : torch.Tensor
        ``[batch_size]`` int32, int64 or uint32: tokens of keys, the queries' own included. On the
        GPU, those that the block table has no room for are left out.
    max_seq_len : int
        At least the largest of them.
    bmm1_scale, bmm2_scale : float or torch.Tensor
        Factors of the logits and of the result; a tensor is one float32 on the device.
    window_left : int
        How many keys before its own position a query sees; -1: all.
    out, out_dtype : optional
        Where the result goes, ``[tokens, num_qo_heads, head_dim]``, and its dtype: by default that
        of `out`, else of `query`.
    sinks : torch.Tensor, optional
        ``[num_qo_heads]`` float32, or a list of one: a logit per head without a value.
    kv_layout : str
        ``"HND"`` or ``"NHD"``.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the device has it.
    backend : str
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``; ``"xqa"`` and ``"trtllm-gen"`` are the
        first.
    q_len_per_req : int, optional
        Query tokens of each request; each sees the keys up to its own, the last of them all.
    mask : torch.Tensor, optional
        As for ``xqa_batch_decode_with_kv_cache``, with `max_q_len` in place of `q_len_per_req`
        beside `cum_seq_lens_q`.
    max_q_len, cum_seq_lens_q : optional
        ``[batch_size + 1]`` int32 or int64: rows of `query` of each request, in place of
        `q_len_per_req`, and a bound of their lengths.
    lse, return_lse : optional
        Where the log-sum-exps go, ``[tokens, num_qo_heads]`` float32 to the base 2, and whether
        they are returned.
    kv_cache_sf : torch.Tensor or tuple of torch.Tensor, optional
        Scales of a 4-bit `kv_cache` (uint8), as for ``BatchPrefillWithPagedKVCacheWrapper.run``;
        those of values in the same order of rows as those of keys.
    multi_ctas_kv_counter_buffer : torch.Tensor, optional
        Not used: the kernels need none.
    o_sf_scale, o_sf_vec_size, skip_softmax_threshold_scale_factor, \
bmm1_scale_log2, enable_block_sparse_attention, causal_seqlens_kv_global, \
bf16q_fp8kv_transform_mode, request_order, request_order_plan
        Must be left out, as `o_scale`, `uses_shared_paged_kv_idx`, `cp_world` and `cp_rank` must be
        what they are: of kernels that there are not.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The result and, with `return_lse`, log-sum-exps.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or lengths of longer queries are on the GPU while a
        graph is captured.
    """
    return plan_decode(locals())()


@flashinfer_api(
    trace=block_table_trace(
        name="trtllm_context", gather=_gathered_context, predict=predict_block_tables
    )
)
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Prefill attention of a batch, planned and run in one call.

    Parameters
    ----------
    query : torch.Tensor
        ``[cum_seq_lens_q[-1], num_qo_heads, head_dim]``.
    kv_cache, workspace_buffer, block_tables, seq_lens, bmm1_scale, bmm2_scale, window_left, out, \
out_dtype, kv_layout, enable_pdl, sinks, lse, return_lse, kv_cache_sf
        As for ``trtllm_batch_decode_with_kv_cache``.
    max_q_len, max_kv_len : int
        At least the largest lengths of queries and of keys.
    batch_size : int
        Requests.
    cum_seq_lens_q : torch.Tensor
        ``[batch_size + 1]`` int32 or int64: rows of `query` of each request.
    cum_seq_lens_kv : torch.Tensor
        ``[batch_size + 1]`` int32 or int64; `seq_lens` and `block_tables` say all of it already.
    causal : bool
        Query i of n sees keys up to ``i + seq_len - n``.
    backend : str
        As for ``trtllm_batch_decode_with_kv_cache``.
    multi_ctas_kv_counter_buffer : torch.Tensor, optional
        Not used: the kernels need none.
    o_sf_scale, o_sf_vec_size, skip_softmax_threshold_scale_factor, \
use_fp16_softmax, uses_spcompress
        Must be left out, and `uses_shared_paged_kv_idx` True: of kernels that there are not.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The result and, with `return_lse`, log-sum-exps.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or lengths are on the GPU while a graph is captured.
    """
    return plan_context(locals())()
