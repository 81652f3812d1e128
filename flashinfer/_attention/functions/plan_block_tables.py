"""Plans attention with pages by block tables, in the call that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._common.cache_layout import split_cache
from ..._common.checks import count as check_count
from ..._common.checks import tensor as check_tensor
from ..._common.dtypes import torch_name
from ...jit.attention.config import FLOAT16, PACKED_FLOAT4
from ..checks import (
    BLACKWELL,
    backend_of_ours,
    check_counters,
    refuse,
    resolve_dtype,
    scalar,
)
from ..index_tensors import check_index_vector, host_indices
from ..wrappers.base import SpecArguments
from ..wrappers.decode import BatchDecodeWithPagedKVCacheWrapper
from ..wrappers.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from .device_lengths import TableLengths, plan_table_lengths
from .draft_masks import as_custom_mask, draft_words

Arguments = Mapping[str, Any]
Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Scale = float | torch.Tensor

_MOST_DECODED = 16
"""Query tokens of a request, up to which lengths on the GPU stay there."""


class PlannedCall(NamedTuple):
    """A wrapper that has planned, and the arguments of its `run`."""

    wrapper: Any
    run: dict[str, Any]

    def __call__(self) -> Any:
        return self.wrapper.run(**self.run)


def plan_decode(call: Arguments, on_host: bool = False) -> PlannedCall:
    """``trtllm_batch_decode_with_kv_cache``, by the names of its arguments; see `on_host` below."""
    _refuse_others(
        call,
        "o_sf_scale", "o_sf_vec_size", "skip_softmax_threshold_scale_factor",
        "bmm1_scale_log2", "enable_block_sparse_attention", "causal_seqlens_kv_global",
        "bf16q_fp8kv_transform_mode", "request_order", "request_order_plan",
        o_scale=1.0,
        cp_world=1,
        cp_rank=0,
    )  # fmt: skip
    per_request = None
    if call["cum_seq_lens_q"] is None:
        tokens = call["q_len_per_req"]
        per_request = check_count("q_len_per_req", 1 if tokens is None else tokens)
    return _plan_call(
        call,
        qo_len=("max_q_len", call["max_q_len"], per_request),
        kv_len=("max_seq_len", call["max_seq_len"]),
        backend=backend_of_ours(call["backend"]),
        on_host=on_host,
    )


def plan_xqa_decode(call: Arguments, on_host: bool = False) -> PlannedCall:
    """``xqa_batch_decode_with_kv_cache``, by the names of its arguments."""
    refuse(
        "there is no kernel for it",
        o_scale=None if call["o_scale"] == 1.0 else call["o_scale"],
    )
    tokens, rows = call["q_len_per_req"], call["q_cu_seq_lens"]
    tokens = check_count("q_len_per_req", 1 if tokens is None else tokens)
    if rows is not None:
        check_index_vector("q_cu_seq_lens", rows)
        requests = len(check_tensor("seq_lens", call["seq_lens"], 1))
        if len(rows) != requests + 1:
            raise ValueError(
                f"`q_cu_seq_lens` must have {requests + 1} elements for {requests} requests, got "
                f"{len(rows)}"
            )
    length = (tokens, None) if rows is not None else (None, tokens)
    return _plan_call(
        {**call, "cum_seq_lens_q": rows},
        qo_len=("q_len_per_req", *length),
        kv_len=("max_seq_len", call["max_seq_len"]),
        backend="auto",
        on_host=on_host,
    )


def plan_context(call: Arguments, on_host: bool = False) -> PlannedCall:
    """``trtllm_batch_context_with_kv_cache``, by the names of its arguments."""
    _refuse_others(
        call,
        "o_sf_scale", "o_sf_vec_size", "skip_softmax_threshold_scale_factor", "use_fp16_softmax",
        "uses_spcompress",
    )  # fmt: skip
    batch_size = call["batch_size"]
    for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
        check_index_vector(name, call[name])
        if len(call[name]) != batch_size + 1:
            raise ValueError(
                f"`{name}` must have {batch_size + 1} elements for `batch_size` {batch_size}, got "
                f"{len(call[name])}"
            )
    return _plan_call(
        call,
        qo_len=("max_q_len", call["max_q_len"], None),
        kv_len=("max_kv_len", call["max_kv_len"]),
        causal=call["causal"],
        backend=backend_of_ours(call["backend"]),
        on_host=on_host,
    )


def _refuse_others(call: Arguments, *absent: str, **fixed: Any) -> None:
    """Refuse arguments of kernels that there are not, unless they are `absent`, or `fixed`."""
    values = {name: call[name] for name in absent}
    changed = {n: call[n] for n, value in fixed.items() if call[n] != value}
    refuse(BLACKWELL, **values, **changed)
    check_counters(call["multi_ctas_kv_counter_buffer"])
    if call["uses_shared_paged_kv_idx"] is not True:
        raise ValueError(
            "`uses_shared_paged_kv_idx` must be True: keys and values have one block table, got "
            f"{call['uses_shared_paged_kv_idx']!r}"
        )


def _plan_call(
    call: Arguments,
    *,
    qo_len: tuple[str, int | None, int | None],
    kv_len: tuple[str, int],
    backend: str,
    on_host: bool,
    causal: bool = True,
) -> PlannedCall:
    """The arguments that all functions have under one name, and the others."""
    same = ("window_left", "out", "sinks", "kv_layout", "enable_pdl", "kv_cache_sf")
    some = ("out_dtype", "lse", "return_lse", "mask")
    return plan_block_tables(
        call["query"],
        call["kv_cache"],
        call["workspace_buffer"],
        call["block_tables"],
        call["seq_lens"],
        call["cum_seq_lens_q"],
        qo_len=qo_len,
        kv_len=kv_len,
        scales=(call["bmm1_scale"], call["bmm2_scale"]),
        causal=causal,
        backend=backend,
        on_host=on_host,
        **{name: call[name] for name in same},
        **{name: call[name] for name in some if name in call},
    )


def attend_block_tables(*args: Any, **kwargs: Any) -> Any:
    """The results of what `plan_block_tables` plans, whose arguments these are."""
    return plan_block_tables(*args, **kwargs)()


def plan_block_tables(
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
    mask: torch.Tensor | None = None,
    on_host: bool = False,
) -> PlannedCall:
    """A wrapper that has planned, and the arguments of its `run`.

    `qo_len` and `kv_len`: name and value of bounds, and the length of all. A `mask` of drafts takes
    the place of causality. With `on_host`, lengths on the GPU are fetched in any case.
    """
    for name, tensor in (("query", query), ("out", out)):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name == "query"):
            raise TypeError(f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}")
    kv_cache, kv_cache_sf = _parts_of(kv_cache), _parts_of(kv_cache_sf)
    k, v = split_cache(kv_cache, "kv_cache")
    inner = tuple(k.shape[2 if v is None else 1 : -1])
    if query.ndim != 3 or len(inner) != 2:
        raise ValueError(
            "`query` must have 3 dimensions and `kv_cache` 4 of keys and 4 of values, or 5, got "
            f"shapes {list(query.shape)} and {list(k.shape)}"
        )
    page_size, num_kv_heads = inner if kv_layout == "NHD" else inner[::-1]
    plan_scale, q_scale = logits_scale(scales[0])
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
    batch = _Batch(block_tables, seq_lens, cum_seq_lens_q, qo_len, kv_len, page_size, mask)
    wrapper = _planned(workspace_buffer, arguments, batch, len(query), kv_layout, backend, on_host)
    run = {
        "q": query,
        "paged_kv_cache": kv_cache,
        "q_scale": q_scale,
        "v_scale": one_number("bmm2_scale", scales[1]),
        "out": out,
        "lse": lse,
        "return_lse": return_lse,
        "sinks": _one_tensor(sinks),
        "enable_pdl": enable_pdl,
        "kv_cache_sf": kv_cache_sf,
    }
    return PlannedCall(wrapper, run)


class _Batch(NamedTuple):
    """A batch as the caller describes it; see `plan_block_tables`."""

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cum_seq_lens_q: torch.Tensor | None
    qo_len: tuple[str, int | None, int | None]
    kv_len: tuple[str, int]
    page_size: int
    mask: torch.Tensor | None

    def most_queries(self) -> int | None:
        """Query tokens of the longest request, as the caller bounds them."""
        _, bound, of_all = self.qo_len
        return bound if of_all is None else of_all


def _planned(
    workspace: torch.Tensor,
    arguments: SpecArguments,
    batch: _Batch,
    qo_tokens: int,
    kv_layout: str,
    backend: str,
    on_host: bool,
) -> BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper:
    """A wrapper with the plan of a batch: made on the GPU where the lengths are there."""
    words, name, most = None, batch.qo_len[0], batch.most_queries()
    if batch.mask is not None:
        if most is None:
            raise ValueError(f"`{name}` must be given with `mask`: a row has as many bits")
        words = draft_words(batch.mask, qo_tokens, (name, check_count(name, most)))
        arguments = arguments._replace(causal=False)
    is_there = isinstance(batch.seq_lens, torch.Tensor) and batch.seq_lens.is_cuda
    is_there = is_there and most is not None and not on_host and backend in ("auto", "fa2")
    if is_there and (tokens := check_count(name, most)) <= _MOST_DECODED:
        check_count(*batch.kv_len)
        decode = BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout, backend=backend)
        lengths = TableLengths(*batch[:3], tokens, batch.page_size, words)
        arguments = arguments._replace(causal=arguments.causal and tokens > 1)
        plan_table_lengths(decode, arguments, lengths, qo_tokens)
        return decode
    prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout, backend=backend)
    _plan_on_host(prefill, arguments, batch, words)
    return prefill


def _plan_on_host(
    wrapper: BatchPrefillWithPagedKVCacheWrapper,
    arguments: SpecArguments,
    batch: _Batch,
    words: torch.Tensor | None,
) -> None:
    """Plan with lengths on the host; `words`: of a mask of drafts."""
    lengths, rows = _host_lengths(batch.seq_lens, batch.cum_seq_lens_q, batch.qo_len[2])
    bounds = (batch.qo_len[:2], batch.kv_len)
    for (name, bound), found in zip(bounds, (rows.diff(), lengths), strict=True):
        if bound is not None:
            check_count(name, bound, int(found.max()) if len(found) else 0)
    page_size = batch.page_size
    counts = (lengths + page_size - 1) // page_size
    a = arguments
    wrapper.plan(
        rows,
        torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(),
        _page_numbers(batch.block_tables, counts),
        (lengths - (counts - 1) * page_size).int().clamp(max=page_size),
        a.num_qo_heads,
        a.num_kv_heads,
        a.head_dim_qk,
        page_size,
        head_dim_vo=a.head_dim_vo,
        custom_mask=None if words is None else as_custom_mask(words, rows, lengths),
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


def _parts_of(cache: Any) -> Any:
    """Keys and values of a cache whose only part is both, as a pair; others as they are."""
    if isinstance(cache, torch.Tensor) and cache.ndim == 5 and cache.shape[1] == 1:
        return cache[:, 0], cache[:, 0]
    return cache


def logits_scale(scale: Scale) -> tuple[float, torch.Tensor | None]:
    """`sm_scale` of the plan, and `q_scale` of the run where the factor is on the device."""
    checked = one_number("bmm1_scale", scale)
    return (1.0, checked) if isinstance(checked, torch.Tensor) else (checked, None)


def one_number(name: str, scale: Scale) -> Any:
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
