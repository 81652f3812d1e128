"""Attention with pages by block tables: ``trtllm_batch_*_with_kv_cache``, for engines that import
them.

The kernels are those of ``BatchPrefillWithPagedKVCacheWrapper``, planned in the call.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..._common.checks import count as check_count
from ..._common.checks import tensor as check_tensor
from ..._common.dtypes import torch_name
from ..._compile.traced import graph_operator
from ..._instrument.decorator import flashinfer_api
from ...jit.attention.config import FLOAT16, PACKED_FLOAT4
from ..checks import BLACKWELL, refuse, resolve_dtype, scalar
from ..index_tensors import check_index_vector, host_indices
from ..wrappers.base import SpecArguments, split_cache
from ..wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from ..wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from .device_lengths import TableLengths, plan_table_lengths
from .graph_results import block_table_results

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Scale = float | torch.Tensor

_MOST_DECODED = 16
"""Query tokens of a request, up to which lengths on the GPU stay there."""


@graph_operator("workspace_buffer", "out", "lse", results=block_table_results)
@flashinfer_api
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

    With `seq_lens` on the GPU and at most 16 query tokens a request, a kernel plans there: the host
    waits for nothing, and a captured graph follows the lengths that it finds. A wrapper that is
    planned once a step spares the kernel in each layer. Otherwise the lengths are fetched.

    Parameters
    ----------
    query : torch.Tensor
        ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``, or as `cum_seq_lens_q` says.
    kv_cache : torch.Tensor or tuple of torch.Tensor
        Keys and values, each ``[num_pages, num_kv_heads, page_size, head_dim]`` (``"HND"``) or
        ``[num_pages, page_size, num_kv_heads, head_dim]`` (``"NHD"``), or one tensor with a
        dimension of 2 after the first; dtypes and strides as for
        ``BatchPrefillWithPagedKVCacheWrapper.run``.
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
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``.
    q_len_per_req : int, optional
        Query tokens of each request; each sees the keys up to its own, the last of them all.
    max_q_len, cum_seq_lens_q : optional
        ``[batch_size + 1]`` int32 or int64: rows of `query` of each request, in place of
        `q_len_per_req`, and a bound of their lengths.
    lse, return_lse : optional
        Where the log-sum-exps go, ``[tokens, num_qo_heads]`` float32 to the base 2, and whether
        they are returned.
    kv_cache_sf : torch.Tensor or tuple of torch.Tensor, optional
        Scales of a 4-bit `kv_cache` (uint8), as for ``BatchPrefillWithPagedKVCacheWrapper.run``;
        those of values in the same order of rows as those of keys.
    o_sf_scale, o_sf_vec_size, mask, skip_softmax_threshold_scale_factor, \
bmm1_scale_log2, multi_ctas_kv_counter_buffer, enable_block_sparse_attention, \
causal_seqlens_kv_global, bf16q_fp8kv_transform_mode, request_order, request_order_plan
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
    refuse(
        BLACKWELL,
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        o_scale=None if o_scale == 1.0 else o_scale,
        mask=mask,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        bmm1_scale_log2=bmm1_scale_log2,
        multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer,
        enable_block_sparse_attention=enable_block_sparse_attention,
        cp_world=None if cp_world == 1 else cp_world,
        cp_rank=None if cp_rank == 0 else cp_rank,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
        bf16q_fp8kv_transform_mode=bf16q_fp8kv_transform_mode,
        request_order=request_order,
        request_order_plan=request_order_plan,
    )
    _check_shared(uses_shared_paged_kv_idx)
    per_request = None
    if cum_seq_lens_q is None:
        per_request = check_count("q_len_per_req", 1 if q_len_per_req is None else q_len_per_req)
    return attend_block_tables(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        qo_len=("max_q_len", max_q_len, per_request),
        kv_len=("max_seq_len", max_seq_len),
        scales=(bmm1_scale, bmm2_scale),
        window_left=window_left,
        causal=True,
        out=out,
        out_dtype=out_dtype,
        sinks=sinks,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
        backend=backend,
        lse=lse,
        return_lse=return_lse,
        kv_cache_sf=kv_cache_sf,
    )


@graph_operator("workspace_buffer", "out", "lse", results=block_table_results)
@flashinfer_api
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
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``; ``"trtllm-gen"``, the default, is the first.
    o_sf_scale, o_sf_vec_size, skip_softmax_threshold_scale_factor, \
multi_ctas_kv_counter_buffer, use_fp16_softmax, uses_spcompress
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
    refuse(
        BLACKWELL,
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
    )
    _check_shared(uses_shared_paged_kv_idx)
    for name, table in (("cum_seq_lens_q", cum_seq_lens_q), ("cum_seq_lens_kv", cum_seq_lens_kv)):
        check_index_vector(name, table)
        if len(table) != batch_size + 1:
            raise ValueError(
                f"`{name}` must have {batch_size + 1} elements for `batch_size` {batch_size}, got "
                f"{len(table)}"
            )
    return attend_block_tables(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        qo_len=("max_q_len", max_q_len, None),
        kv_len=("max_kv_len", max_kv_len),
        scales=(bmm1_scale, bmm2_scale),
        window_left=window_left,
        causal=causal,
        out=out,
        out_dtype=out_dtype,
        sinks=sinks,
        kv_layout=kv_layout,
        enable_pdl=enable_pdl,
        backend="auto" if backend == "trtllm-gen" else backend,
        lse=lse,
        return_lse=return_lse,
        kv_cache_sf=kv_cache_sf,
    )


def attend_block_tables(
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cum_seq_lens_q: torch.Tensor | None,
    *,
    qo_len: tuple[str, int | None, int | None],
    kv_len: tuple[str, int],
    scales: tuple[Scale, Scale],
    window_left: int,
    causal: bool,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | str | None = None,
    sinks: torch.Tensor | Sequence[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    kv_cache_sf: Any = None,
) -> Any:
    """Both functions; `qo_len` and `kv_len`: name and value of bounds, and the length of all."""
    for name, tensor in (("query", query), ("out", out)):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name == "query"):
            raise TypeError(f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}")
    k, v = split_cache(kv_cache, "kv_cache")
    inner = tuple(k.shape[2 if v is None else 1 : -1])
    if query.ndim != 3 or len(inner) != 2:
        raise ValueError(
            "`query` must have 3 dimensions and `kv_cache` 4 of keys and 4 of values, or 5, got "
            f"shapes {list(query.shape)} and {list(k.shape)}"
        )
    page_size, num_kv_heads = inner if kv_layout == "NHD" else inner[::-1]
    plan_scale, q_scale = _logits_scale(scales[0])
    if out_dtype is None:
        out_dtype = query.dtype if out is None else out.dtype
    if resolve_dtype("out_dtype", out_dtype) not in FLOAT16:
        raise ValueError(f"`out_dtype` must be float16 or bfloat16, got {out_dtype}")
    arguments = SpecArguments(
        num_qo_heads=query.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim_qk=query.shape[2],
        head_dim_vo=(k if v is None else v).shape[-1] * (2 if k.dtype == PACKED_FLOAT4 else 1),
        window_left=window_left,
        sm_scale=plan_scale,
        q_data_type=query.dtype,
        kv_data_type=k.dtype,
        o_data_type=out_dtype,
        causal=causal,
    )
    most = qo_len[1] if qo_len[2] is None else qo_len[2]
    is_there = isinstance(seq_lens, torch.Tensor) and seq_lens.is_cuda and most is not None
    is_portable = backend in ("auto", "fa2")
    wrapper: BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper
    if is_there and is_portable and (tokens := check_count(qo_len[0], most)) <= _MOST_DECODED:
        check_count(*kv_len)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace_buffer, kv_layout, backend=backend)
        lengths = TableLengths(block_tables, seq_lens, cum_seq_lens_q, tokens, page_size)
        arguments = arguments._replace(causal=causal and tokens > 1)
        plan_table_lengths(wrapper, arguments, lengths, len(query))
    else:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, kv_layout, backend=backend)
        lengths_ = _host_lengths(seq_lens, cum_seq_lens_q, qo_len[2])
        _plan_on_host(wrapper, arguments, block_tables, lengths_, page_size, (qo_len[:2], kv_len))
    return wrapper.run(
        query,
        kv_cache,
        q_scale=q_scale,
        v_scale=_one_number("bmm2_scale", scales[1]),
        out=out,
        lse=lse,
        return_lse=return_lse,
        sinks=_one_tensor(sinks),
        enable_pdl=enable_pdl,
        kv_cache_sf=kv_cache_sf,
    )


def _plan_on_host(
    wrapper: BatchPrefillWithPagedKVCacheWrapper,
    arguments: SpecArguments,
    block_tables: torch.Tensor,
    lengths_and_rows: tuple[torch.Tensor, torch.Tensor],
    page_size: int,
    bounds: tuple[tuple[str, int | None], tuple[str, int]],
) -> None:
    """Plan with lengths on the host; `bounds`: name and value of those of queries and keys."""
    lengths, rows = lengths_and_rows
    for (name, bound), found in zip(bounds, (rows.diff(), lengths), strict=True):
        if bound is not None:
            check_count(name, bound, int(found.max()) if len(found) else 0)
    counts = (lengths + page_size - 1) // page_size
    a = arguments
    wrapper.plan(
        rows,
        torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(),
        _page_numbers(block_tables, counts),
        (lengths - (counts - 1) * page_size).int().clamp(max=page_size),
        a.num_qo_heads,
        a.num_kv_heads,
        a.head_dim_qk,
        page_size,
        head_dim_vo=a.head_dim_vo,
        causal=a.causal,
        sm_scale=a.sm_scale,
        window_left=a.window_left,
        q_data_type=a.q_data_type,
        kv_data_type=a.kv_data_type,
        o_data_type=a.o_data_type,
    )


def _host_lengths(
    seq_lens: torch.Tensor, cum_seq_lens_q: torch.Tensor | None, per_request: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths of keys, and first rows of queries, on the host; fetched by one copy at most."""
    wanted = {"seq_lens": seq_lens}
    if cum_seq_lens_q is not None:
        wanted["cum_seq_lens_q"] = cum_seq_lens_q
    for name, tensor in wanted.items():
        check_index_vector(name, tensor)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"`{name}` must be on the host while a CUDA graph is captured: the plan reads it. "
                "BatchDecodeWithPagedKVCacheWrapper(use_cuda_graph=True) is planned outside of it"
            )
    lengths, *rows = host_indices(wanted)
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"`seq_lens` must not be negative, got {int(lengths.min())}")
    if per_request is not None:
        return lengths, torch.arange(len(lengths) + 1, dtype=torch.int32) * per_request
    if len(rows[0]) != len(lengths) + 1:
        raise ValueError(
            f"`cum_seq_lens_q` must have {len(lengths) + 1} elements for {len(lengths)} requests, "
            f"got {len(rows[0])}"
        )
    return lengths, rows[0]


def _page_numbers(block_tables: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The first `counts` (on the host) entries of each row, as one vector."""
    check_tensor("block_tables", block_tables)
    needed = int(counts.max()) if len(counts) else 0
    if (
        block_tables.dtype not in (torch.int32, torch.int64)
        or block_tables.ndim != 2
        or len(block_tables) != len(counts)
        or block_tables.shape[1] < needed
    ):
        raise ValueError(
            f"`block_tables` must be int32 or int64 [{len(counts)}, at least {needed}] for these "
            f"`seq_lens`, got {torch_name(block_tables.dtype)} {list(block_tables.shape)}"
        )
    inside = torch.arange(block_tables.shape[1]) < counts[:, None]
    places = inside.flatten().nonzero().squeeze(1)  # on the host, which need not wait for a GPU
    return block_tables.reshape(-1)[places.to(block_tables.device)]


def _logits_scale(scale: Scale) -> tuple[float, torch.Tensor | None]:
    """`sm_scale` of the plan, and `q_scale` of the run where the factor is on the device."""
    checked = _one_number("bmm1_scale", scale)
    return (1.0, checked) if isinstance(checked, torch.Tensor) else (checked, None)


def _one_number(name: str, scale: Scale) -> Any:
    if not isinstance(scale, torch.Tensor) or scale.is_cpu:
        return scalar(name, scale)
    if not scale.is_floating_point() or scale.numel() != 1:
        raise ValueError(
            f"`{name}` must be a number or one float32, got "
            f"{torch_name(scale.dtype)} of shape {list(scale.shape)}"
        )
    return scale.float().reshape(1)


def _one_tensor(sinks: Any) -> torch.Tensor | None:
    if isinstance(sinks, (list, tuple)) and len(sinks) == 1:
        sinks = sinks[0]
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        raise TypeError(f"`sinks` must be a torch.Tensor or a list of one, got {sinks!r}")
    return sinks


def _check_shared(uses_shared_paged_kv_idx: bool) -> None:
    if uses_shared_paged_kv_idx is not True:
        raise ValueError(
            "`uses_shared_paged_kv_idx` must be True: keys and values have one block table, got "
            f"{uses_shared_paged_kv_idx!r}"
        )
