"""Attention over paged and ragged keys and values: `run` of the wrappers, and single requests.

A routine plans once, on lengths that lie on the host, and times `run`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence

import torch

from flashinfer.testing.attention import attention_check_options
from flashinfer.testing.flops import attention_flops_with_actual_seq_lens

from .attention_inputs import (
    CAUSAL,
    HEADS,
    PAGES,
    PREFILL_BACKENDS,
    PageTable,
    backend_of,
    check_one_head_dim,
    dims_of,
    indptr_of,
    int32,
    key_tensors,
    make_wrapper,
    planned,
    query_tensors,
    result_dtype,
    types_of,
    workspace_on,
)
from .base import Arguments, Backend, Flag, Routine, not_negative, positive, register

_BATCH = [
    Flag("batch_size", positive, 16, "requests"),
    Flag(
        "random_actual_seq_len", bool, False, "lengths drawn from 1 to --s_qo and --s_kv, not those"
    ),
    Flag("longer_request", positive, 1, "one request has this many times as many keys"),
]
_QO = Flag("s_qo", positive, 1024, "query tokens of a request")
_KV = Flag("s_kv", positive, 1024, "tokens of keys and values of a request, queries included")
_DECODING = [
    Flag("decode_requests", not_negative, 0, "requests more, of one query token"),
    Flag("decode_s_kv", positive, 1024, "their tokens of keys and values"),
]


def lengths(case: Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key tokens of each request, int32 on the CPU; a function of the flags alone."""
    decoding = getattr(case, "decode_requests", 0)
    qo, kv = _lengths(case)
    if decoding:
        qo = torch.cat([int32([1] * decoding), qo])
        kv = torch.cat([int32([case.decode_s_kv] * decoding), kv])
    return qo, kv


def _lengths(case: Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    count, s_qo = getattr(case, "batch_size", 1), getattr(case, "s_qo", 1)
    times = torch.ones(count, dtype=torch.int32)
    times[count // 2] = getattr(case, "longer_request", 1)
    if not getattr(case, "random_actual_seq_len", False):
        return int32([s_qo] * count), int32([case.s_kv] * count) * times
    generator = torch.Generator().manual_seed(case.random_seed)
    fractions = torch.rand(2, count, generator=generator, dtype=torch.float64)
    qo = 1 + (fractions[0] * s_qo).int()
    shortest = qo.clamp(max=case.s_kv)  # the queries are the newest of the keys where there is room
    return qo, (shortest + (fractions[1] * (case.s_kv - shortest + 1)).int()) * times


def _flops(case: Namespace) -> int:
    return attention_flops_with_actual_seq_lens(
        *lengths(case), case.head_dim_qk, case.head_dim_vo, case.num_qo_heads, case.causal
    )


def _build_decode(case: Namespace, device: str) -> Arguments:
    check_one_head_dim(case, "decode")
    _, kv_len = lengths(case)
    pages = PageTable(case, kv_len, device)
    wrapper = planned(
        make_wrapper(
            "decode",
            "BatchDecodeWithPagedKVCacheWrapper",
            float_workspace_buffer=workspace_on(device),
            kv_layout=pages.kv_layout,
        ),
        device,
        indptr=pages.indptr,
        indices=pages.indices,
        last_page_len=pages.last_page_len,
        num_qo_heads=case.num_qo_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim_qk,
        page_size=case.page_size,
        **types_of(case),
    )
    queries = query_tensors(case, case.batch_size, device)
    return {"self": wrapper, **queries, "paged_kv_cache": pages.cache}


def _build_paged(case: Namespace, device: str) -> Arguments:
    qo_len, kv_len = lengths(case)
    pages = PageTable(case, kv_len, device)
    wrapper = planned(
        make_wrapper(
            "prefill",
            "BatchPrefillWithPagedKVCacheWrapper",
            float_workspace_buffer=workspace_on(device),
            kv_layout=pages.kv_layout,
            backend=backend_of(case),
        ),
        device,
        qo_indptr=indptr_of(qo_len),
        paged_kv_indptr=pages.indptr,
        paged_kv_indices=pages.indices,
        paged_kv_last_page_len=pages.last_page_len,
        page_size=case.page_size,
        causal=case.causal,
        o_data_type=result_dtype(case),
        **dims_of(case),
        **types_of(case),
    )
    queries = query_tensors(case, int(qo_len.sum()), device)
    return {"self": wrapper, **queries, "paged_kv_cache": pages.cache}


def _build_mixed(case: Namespace, device: str) -> Arguments:
    qo_len, kv_len = lengths(case)
    pages = PageTable(case, kv_len, device)
    wrapper = planned(
        make_wrapper(
            "attention",
            "BatchAttention",
            kv_layout=pages.kv_layout,
            device=device,
            backend=backend_of(case),
        ),
        device,
        qo_indptr=indptr_of(qo_len),
        kv_indptr=pages.indptr,
        kv_indices=pages.indices,
        kv_len_arr=kv_len,
        page_size=case.page_size,
        causal=case.causal,
        **dims_of(case),
        **types_of(case),
    )
    queries = query_tensors(case, int(qo_len.sum()), device)
    return {"self": wrapper, **queries, "kv_cache": pages.cache}


def _build_ragged(case: Namespace, device: str) -> Arguments:
    qo_len, kv_len = lengths(case)
    wrapper = planned(
        make_wrapper(
            "prefill",
            "BatchPrefillWithRaggedKVCacheWrapper",
            float_workspace_buffer=workspace_on(device),
            backend=backend_of(case),
        ),
        device,
        qo_indptr=indptr_of(qo_len),
        kv_indptr=indptr_of(kv_len),
        causal=case.causal,
        o_data_type=result_dtype(case),
        **dims_of(case),
        **types_of(case),
    )
    queries = query_tensors(case, int(qo_len.sum()), device)
    return {"self": wrapper, **queries, **key_tensors(case, int(kv_len.sum()), device)}


def _build_single_prefill(case: Namespace, device: str) -> Arguments:
    q = query_tensors(case, case.s_qo, device)["q"]
    options = {"causal": case.causal, "backend": backend_of(case), "o_dtype": result_dtype(case)}
    return {"q": q, **key_tensors(case, case.s_kv, device), **options}


def _build_single_decode(case: Namespace, device: str) -> Arguments:
    q = query_tensors(case, 1, device)["q"][0]
    return {"q": q, **key_tensors(case, case.s_kv, device)}


def _cache_bytes(name: str) -> Callable[[Arguments], int]:
    """Bytes of the cached tokens: the rest of a last page is not read."""

    def count(arguments: Arguments) -> int:
        problem = arguments["self"]._problem
        rows = int(problem.requests.kv_lengths().sum()) * problem.spec.num_kv_heads
        return sum(rows * part.shape[-1] * part.element_size() for part in arguments[name])

    return count


def _result_bytes(arguments: Arguments) -> int:
    """Of a function that allocates its result, whose elements have two bytes."""
    q, v = arguments["q"], arguments["v"]
    return 2 * q.numel() // q.shape[-1] * v.shape[-1]


def torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
) -> torch.Tensor:
    """PyTorch's attention with the arguments of ``single_prefill_with_kv_cache``."""
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(len(q), len(k)) if causal else None
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    result = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True
    )
    return result[0].transpose(0, 1)


def _register_wrapper(
    module: str,
    name: str,
    build: Callable[[Namespace, str], Arguments],
    flags: list[Flag],
    cache: str | None,
    flops: Callable[[Namespace], int] | None = _flops,
    backends: Sequence[str] = ("fa2",),
) -> None:
    """The `run` of a wrapper; `cache` is what it calls a paged cache."""
    api = f"flashinfer.{module}:{name}.run"
    register(
        Routine(
            name=name,
            api=api,
            flags=flags,
            build=build,
            reads=["q"] if cache else ["q", "k", "v"],
            writes=["out"],
            fresh=_cache_bytes(cache) if cache else None,
            flops=flops,
            check_options=attention_check_options,
            backends={backend: Backend(api) for backend in backends},
        )
    )


def _register_single(
    module: str,
    name: str,
    build: Callable[[Namespace, str], Arguments],
    flags: list[Flag],
    flops: Callable[[Namespace], int] | None = None,
    backends: Sequence[str] = ("fa2",),
    peers: Mapping[str, Backend] | None = None,
) -> None:
    api = f"flashinfer.{module}:{name}"
    register(
        Routine(
            name=name,
            api=api,
            flags=flags,
            build=build,
            reads=["q", "k", "v"],
            writes=[],
            fresh=_result_bytes,
            flops=flops,
            check_options=attention_check_options,
            backends={**{backend: Backend(api) for backend in backends}, **(peers or {})},
        )
    )


_PAGED = [*_BATCH, _QO, _KV, *HEADS, *PAGES, CAUSAL]
_register_wrapper(
    "decode",
    "BatchDecodeWithPagedKVCacheWrapper",
    _build_decode,
    [*_BATCH, _KV, *HEADS, *PAGES],
    "paged_kv_cache",
    flops=None,
)
_register_wrapper(
    "prefill",
    "BatchPrefillWithPagedKVCacheWrapper",
    _build_paged,
    _PAGED,
    "paged_kv_cache",
    backends=PREFILL_BACKENDS,
)
_register_wrapper(
    "prefill",
    "BatchPrefillWithRaggedKVCacheWrapper",
    _build_ragged,
    [*_BATCH, _QO, _KV, *HEADS, CAUSAL],
    None,
    backends=PREFILL_BACKENDS,
)
_register_wrapper(
    "attention",
    "BatchAttention",
    _build_mixed,
    [*_PAGED, *_DECODING],
    "kv_cache",
    backends=PREFILL_BACKENDS,
)
_register_single("decode", "single_decode_with_kv_cache", _build_single_decode, [_KV, *HEADS])
_register_single(
    "prefill",
    "single_prefill_with_kv_cache",
    _build_single_prefill,
    [_QO, _KV, *HEADS, CAUSAL],
    flops=_flops,
    backends=PREFILL_BACKENDS,
    peers={"torch": Backend(torch_attention, omits=["backend", "o_dtype"])},
)
