"""Attention with the arguments of FlashInfer's cuDNN functions, over the kernels of the wrappers.

Source of the arguments' meaning: FlashInfer's documentation of ``flashinfer.cudnn``.
"""

import math
from typing import Any

import torch

from ..._common.checks import choice as check_choice
from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..._common.checks import tensor as check_tensor
from ..._compile.traced import graph_operator
from ..._instrument.decorator import flashinfer_api
from ...trace.templates.block_tables import (
    check_offsets,
    check_rows,
    cudnn_batch_decode_trace,
    lengths_of,
)
from ..backends import check_lse_base
from ..checks import scalar
from ..index_tensors import host_indices
from ..wrappers.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper
from .graph_results import cudnn_prefill_results
from .plan_block_tables import attend_block_tables

_BACKENDS = (None, "auto", "fa2", "fa3", "cudnn")


@graph_operator("workspace_buffer", "out", "lse", results=cudnn_prefill_results)
@flashinfer_api
def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor | None = None,
    actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    causal: bool,
    return_lse: bool,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    batch_offsets_stats: torch.Tensor | None = None,
    batch_offsets_units: str = "elements",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
    o_data_type: torch.dtype | None = None,
    lse_base: str = "log2",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prefill attention of a batch, planned and run in one call: vision towers call it.

    Lengths and offsets that are on the GPU are fetched by one copy, for which the host waits.

    Parameters
    ----------
    q : torch.Tensor
        ``[tokens, num_qo_heads, head_dim]``, rows at multiples of 16 bytes.
    k_cache, v_cache : torch.Tensor
        ``[tokens, num_kv_heads, head_dim]``, or with `block_tables` pages
        ``[num_pages, num_kv_heads, page_size, head_dim]``; dtypes as for the wrappers of prefill.
    scale : float
        Factor of the logits.
    workspace_buffer : torch.Tensor
        For partial results of requests that are split; contiguous, any dtype.
    max_token_per_sequence, max_sequence_kv : int
        At least the largest lengths of queries and of keys.
    actual_seq_lens_q, actual_seq_lens_kv : torch.Tensor, optional
        Lengths of each request, ``[batch_size]`` or ``[batch_size, 1, 1, 1]``, int32 or int64; by
        default the differences of `batch_offsets_q` and `batch_offsets_k`.
    block_tables : torch.Tensor, optional
        ``[batch_size, max_pages]`` int32 or int64: page numbers of each request.
    causal : bool
        Query i of n sees keys up to ``i + kv_len - n``.
    return_lse : bool
        Whether log-sum-exps are returned.
    q_scale, k_scale, v_scale : torch.Tensor, optional
        Factors of queries, keys and values: numbers, or one float32 on the device.
    batch_offsets_q, batch_offsets_k, batch_offsets_v, batch_offsets_o : torch.Tensor, optional
        Where each request begins, ``[batch_size + 1]`` int32 or int64. Requests lie one after the
        other, which they are by default.
    batch_offsets_stats : torch.Tensor, optional
        The same for `lse`, which then has the rows of `q`: ``[tokens, num_qo_heads]``.
    batch_offsets_units : str
        ``"elements"`` of the tensor's memory, or ``"tokens"``.
    out : torch.Tensor, optional
        Where the result goes, ``[tokens, num_qo_heads, head_dim_vo]``.
    lse : torch.Tensor, optional
        Buffer for log-sum-exps, float32 ``[batch_size, max_token_per_sequence, num_qo_heads]``.
        Rows that no query has stay as they are.
    is_cuda_graph_compatible : bool
        Accepted: what decides is that a capture has lengths and offsets on the host.
    backend : str, optional
        ``"auto"`` (also None and ``"cudnn"``), ``"fa2"`` or, on Hopper, ``"fa3"``.
    o_data_type : torch.dtype, optional
        Type of the result: float16 or bfloat16, by default that of `out`, else of `q`.
    lse_base : str
        ``"log2"`` or ``"ln"``.

    Returns
    -------
    tuple
        The result, and log-sum-exps or None.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.
    """
    q, k_cache = check_tensor("q", q, 3), check_tensor("k_cache", k_cache)
    v_cache = check_tensor("v_cache", v_cache, k_cache.ndim)
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    check_flag("is_cuda_graph_compatible", is_cuda_graph_compatible)
    check_choice("batch_offsets_units", batch_offsets_units, ("elements", "tokens"))
    check_choice("backend", backend, _BACKENDS)
    check_lse_base(lse_base)
    tensors = {"q": q, "k": k_cache, "v": v_cache, "o": q if out is None else out}
    offsets = {
        "q": batch_offsets_q,
        "k": batch_offsets_k,
        "v": batch_offsets_v,
        "o": batch_offsets_o,
    }
    if out is None and q.stride(0) != q.shape[1] * v_cache.shape[-1]:
        offsets.pop("o")  # of a result that is made here, in the order of the queries
    if block_tables is not None:
        offsets = {name: offsets[name] for name in ("q", "o") if name in offsets}
    wanted = {"q": actual_seq_lens_q, "k": actual_seq_lens_kv}
    strides = {
        name: 1 if batch_offsets_units == "tokens" else tensors[name].stride(0) for name in offsets
    }
    starts_q, starts_k = _starts(wanted, offsets, strides)
    for name, bound, starts in (
        ("max_token_per_sequence", max_token_per_sequence, starts_q),
        ("max_sequence_kv", max_sequence_kv, starts_k),
    ):
        check_count(name, bound, int(starts.diff().max()) if len(starts) > 1 else 0)
    if o_data_type is None:
        o_data_type = q.dtype if out is None else out.dtype
    found = _attend(
        (q, k_cache, v_cache),
        (starts_q, starts_k),
        workspace_buffer,
        block_tables,
        scale=scalar("scale", scale),
        scales=(q_scale, k_scale, v_scale),
        causal=causal,
        out=out,
        o_data_type=o_data_type,
        backend="auto" if backend in (None, "cudnn") else backend,
    )
    if not return_lse:
        return found[0], None
    factor = math.log(2.0) if lse_base == "ln" else 1.0
    rows = found[1] * factor
    if batch_offsets_stats is None:
        return found[0], _padded(rows, lse, starts_q, max_token_per_sequence)
    return found[0], rows if lse is None else check_tensor("lse", lse, 2).copy_(rows)


def _attend(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    starts: tuple[torch.Tensor, torch.Tensor],
    workspace: torch.Tensor,
    block_tables: torch.Tensor | None,
    *,
    scale: float,
    scales: tuple[Any, Any, Any],
    causal: bool,
    out: torch.Tensor | None,
    o_data_type: torch.dtype,
    backend: str,
) -> Any:
    """Result and log-sum-exps, of rows of keys or of pages."""
    q, k, v = tensors
    if block_tables is None:
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
        wrapper.plan(
            *starts,
            q.shape[1],
            k.shape[1],
            q.shape[2],
            head_dim_vo=v.shape[2],
            causal=causal,
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
            o_data_type=o_data_type,
        )
        q_scale, k_scale, v_scale = scales
        named = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return wrapper.run(q, k, v, out=out, return_lse=True, **named)
    logits_scale: Any = scale
    for name, factor in zip(("q_scale", "k_scale"), scales, strict=False):
        if factor is not None:
            on_gpu = isinstance(factor, torch.Tensor) and not factor.is_cpu
            logits_scale = logits_scale * (factor if on_gpu else scalar(name, factor))
    lengths = starts[1].diff()
    return attend_block_tables(
        q,
        (k, v),
        workspace,
        block_tables,
        lengths,
        starts[0],
        qo_len=("max_token_per_sequence", None, None),
        kv_len=("max_sequence_kv", int(lengths.max()) if len(lengths) else 0),
        scales=(logits_scale, 1.0 if scales[2] is None else scales[2]),
        window_left=-1,
        causal=causal,
        out=out,
        out_dtype=o_data_type,
        backend=backend,
        return_lse=True,
    )


def _starts(
    lengths: dict[str, Any], offsets: dict[str, Any], strides: dict[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """First tokens of the requests' queries and keys, int32 on the host, and their ends.

    Raises
    ------
    ValueError
        If lengths are unknown, or offsets say that requests do not follow each other.
    """
    names = {"q": "actual_seq_lens_q", "k": "actual_seq_lens_kv"}
    given = {
        names[name]: check_tensor(names[name], x) for name, x in lengths.items() if x is not None
    }
    given = {name: x.reshape(-1) for name, x in given.items()}
    given |= {f"batch_offsets_{name}": x for name, x in offsets.items() if x is not None}
    host = dict(zip(given, (x.to(torch.int64) for x in host_indices(given)), strict=True))
    starts = {}
    for name, argument in names.items():
        if argument in host:
            if len(host[argument]) and int(host[argument].min()) < 0:
                raise ValueError(
                    f"`{argument}` must not be negative, got {int(host[argument].min())}"
                )
            starts[name] = torch.nn.functional.pad(host[argument].cumsum(0), (1, 0))
        elif f"batch_offsets_{name}" in host:
            starts[name] = host[f"batch_offsets_{name}"] // strides[name]
        else:
            raise ValueError(f"`{argument}` or `batch_offsets_{name}` must be given, got None")
    if len(starts["q"]) != len(starts["k"]):
        raise ValueError(
            "`actual_seq_lens_kv` must have as many requests as the queries, "
            f"{len(starts['q']) - 1}, got {len(starts['k']) - 1}"
        )
    for name, stride in strides.items():
        found, expected = host.get(f"batch_offsets_{name}"), starts["k" if name in "kv" else "q"]
        if found is not None and not torch.equal(found, expected * stride):
            raise ValueError(
                f"`batch_offsets_{name}` must be those of requests that follow each other, "
                f"{(expected * stride)[:4].tolist()}..., got {found[:4].tolist()}..."
            )
    return starts["q"].int(), starts["k"].int()


def _padded(
    rows: torch.Tensor, lse: torch.Tensor | None, starts: torch.Tensor, longest: int
) -> torch.Tensor:
    """Log-sum-exps of each request in rows of its own, ``[batch_size, longest, heads]``."""
    lengths = starts.diff().long()
    shape = (len(lengths), longest, rows.shape[1])
    if lse is None:
        lse = rows.new_full(shape, -math.inf)
    elif tuple(check_tensor("lse", lse).shape) != shape or lse.dtype != torch.float32:
        raise ValueError(
            f"`lse` must be float32 of shape {list(shape)}, got {lse.dtype} of shape "
            f"{list(lse.shape)}"
        )
    places = (torch.arange(longest) < lengths[:, None]).to(rows.device)
    lse[places] = rows
    return lse


@flashinfer_api(trace=cudnn_batch_decode_trace)
def cudnn_batch_decode_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse: torch.Tensor | None = None,
    q_len_per_req: int = 1,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode attention of a batch, planned and run in one call.

    With lengths on the GPU the work is divided there: the host waits for nothing, and a captured
    graph follows the lengths that it finds.

    Parameters
    ----------
    q : torch.Tensor
        ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``.
    k_cache, v_cache : torch.Tensor
        Pages, ``[num_pages, num_kv_heads, page_size, head_dim]``; without `block_tables` page b is
        request b's only one.
    scale : float
        Factor of the logits.
    workspace_buffer : torch.Tensor
        For partial results of requests that are split; contiguous, any dtype.
    max_sequence_kv : int
        At least the largest length.
    actual_seq_lens_kv : torch.Tensor
        Tokens of keys of each request, ``[batch_size]`` or ``[batch_size, 1, 1, 1]``, int32, int64
        or uint32.
    block_tables : torch.Tensor, optional
        ``[batch_size, max_pages]`` int32 or int64: page numbers of each request.
    is_cuda_graph_compatible : bool
        Accepted: calls can be captured with lengths on the GPU.
    batch_offsets_q, batch_offsets_o, batch_offsets_k, batch_offsets_v : torch.Tensor, optional
        ``[batch_size + 1]`` int32 or int64: where each request begins in the memory of the tensor,
        counted in elements. Requests lie one after the other, as by default. On the GPU a kernel
        asserts that. Beside `block_tables` nobody reads `batch_offsets_k` and
        `batch_offsets_v`.
    out : torch.Tensor, optional
        Where the result goes, ``[tokens, num_qo_heads, head_dim]``; its dtype is the result's, else
        that of `q`.
    return_lse, lse : optional
        Whether log-sum-exps to the base 2 are returned, and where they go: ``[tokens,
        num_qo_heads]`` float32.
    q_len_per_req : int
        Query tokens of each request; each sees the keys up to its own, the last of them all.
    window_left : int
        How many keys before its own position a query sees; -1: all.
    sinks : torch.Tensor, optional
        ``[num_qo_heads]`` float32: a logit per head without a value.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The result and, with `return_lse`, log-sum-exps.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.
    """
    call = locals()
    check_flag("is_cuda_graph_compatible", is_cuda_graph_compatible)
    check_tensor("k_cache", k_cache, 4)
    check_tensor("v_cache", v_cache, 4)
    lengths = lengths_of("actual_seq_lens_kv", actual_seq_lens_kv)
    tokens = check_count("q_len_per_req", q_len_per_req)
    check_rows(q, tokens, len(lengths))
    if block_tables is None and len(k_cache) != len(lengths):
        raise ValueError(
            "`block_tables` must be given unless each request has one page, got "
            f"{len(k_cache)} pages for {len(lengths)} requests"
        )
    check_offsets(q, (k_cache, v_cache), call, len(lengths), tokens)
    if block_tables is None:
        block_tables = torch.arange(len(lengths), dtype=torch.int32, device=q.device)[:, None]
    return attend_block_tables(
        q,
        (k_cache, v_cache),
        workspace_buffer,
        block_tables,
        lengths,
        None,
        qo_len=("q_len_per_req", None, tokens),
        kv_len=("max_sequence_kv", max_sequence_kv),
        scales=(scalar("scale", scale), 1.0),
        window_left=window_left,
        causal=True,
        out=out,
        sinks=sinks,
        lse=lse,
        return_lse=return_lse,
    )
