"""Attention over paged and ragged keys and values: `run` of the wrappers, and single requests.

A routine plans once, on lengths that lie on the host, and times `run`.
"""

from __future__ import annotations

import contextlib
import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import flashinfer
from flashinfer.testing import make_tensor
from flashinfer.testing.attention import attention_check_options
from flashinfer.testing.flops import attention_flops_with_actual_seq_lens

from .base import (
    Arguments,
    Backend,
    Flag,
    Routine,
    dtype_name,
    not_negative,
    positive,
    register,
    torch_dtype,
)

PREFILL_BACKENDS = ("auto", "fa2", "fa3")
_WORKSPACE_BYTES = 256 << 20  # more than any plan of a benchmark needs

_BATCH = [
    Flag("batch_size", positive, 16, "requests"),
    Flag(
        "random_actual_seq_len", bool, False, "lengths drawn from 1 to --s_qo and --s_kv, not those"
    ),
    Flag("longer_request", positive, 1, "one request has this many times as many keys"),
]
_QO = Flag("s_qo", positive, 1024, "query tokens of a request")
_KV = Flag("s_kv", positive, 1024, "tokens of keys and values of a request, queries included")
_HEADS = [
    Flag("num_qo_heads", positive, 32, "heads of queries and results"),
    Flag("num_kv_heads", positive, 8, "heads of keys and values"),
    Flag("head_dim_qk", positive, 128, "elements of a head of queries and keys"),
    Flag("head_dim_vo", positive, 128, "elements of a head of values and results"),
    Flag("q_dtype", dtype_name, "bfloat16", "dtype of queries; results of 8 bits are bfloat16"),
    Flag("kv_dtype", dtype_name, "bfloat16", "dtype of keys and values"),
]
_PAGES = [
    Flag("page_size", positive, 16, "tokens of a page"),
    Flag("hnd", bool, False, "heads before tokens in the cache"),
]
_DECODING = [
    Flag("decode_requests", not_negative, 0, "requests more, of one query token"),
    Flag("decode_s_kv", positive, 1024, "their tokens of keys and values"),
]
_CAUSAL = Flag("causal", bool, False, "a query sees no key behind it; aligned to the end")


def lengths(case: Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key tokens of each request, int32 on the CPU; a function of the flags alone."""
    decoding = getattr(case, "decode_requests", 0)
    qo, kv = _lengths(case)
    if decoding:
        qo = torch.cat([_int32([1] * decoding), qo])
        kv = torch.cat([_int32([case.decode_s_kv] * decoding), kv])
    return qo, kv


def _lengths(case: Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    count, s_qo = getattr(case, "batch_size", 1), getattr(case, "s_qo", 1)
    times = torch.ones(count, dtype=torch.int32)
    times[count // 2] = getattr(case, "longer_request", 1)
    if not getattr(case, "random_actual_seq_len", False):
        return _int32([s_qo] * count), _int32([case.s_kv] * count) * times
    generator = torch.Generator().manual_seed(case.random_seed)
    fractions = torch.rand(2, count, generator=generator, dtype=torch.float64)
    qo = 1 + (fractions[0] * s_qo).int()
    shortest = qo.clamp(max=case.s_kv)  # the queries are the newest of the keys where there is room
    return qo, (shortest + (fractions[1] * (case.s_kv - shortest + 1)).int()) * times


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _indptr(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([_int32([0]), counts.cumsum(0, dtype=torch.int32)])


def _flops(case: Namespace) -> int:
    return attention_flops_with_actual_seq_lens(
        *lengths(case), case.head_dim_qk, case.head_dim_vo, case.num_qo_heads, case.causal
    )


def _wrapper(module: str, name: str, **arguments: Any) -> Any:
    return getattr(importlib.import_module(f"flashinfer.{module}"), name)(**arguments)


def _planned(wrapper: Any, device: str, **arguments: Any) -> Any:
    """The wrapper after its plan. Without a GPU it is one for the reference backend."""
    on_gpu = torch.device(device).type == "cuda"
    with contextlib.nullcontext() if on_gpu else flashinfer.reference_backend():
        wrapper.plan(**arguments)
    return wrapper


def _workspace(device: str) -> torch.Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _queries(case: Namespace, tokens: int, device: str) -> Arguments:
    """The queries and where the results go."""
    dtype, shape = torch_dtype(case.q_dtype), (tokens, case.num_qo_heads)
    q = make_tensor(*shape, case.head_dim_qk, dtype=dtype, device=device)
    return {"q": q, "out": q.new_empty(*shape, case.head_dim_vo, dtype=_result_dtype(case))}


def _result_dtype(case: Namespace) -> torch.dtype:
    dtype = torch_dtype(case.q_dtype)
    return dtype if dtype.itemsize > 1 else torch.bfloat16


def _backend(case: Namespace) -> str:
    """What the wrapper or function is told; nothing where a peer is timed."""
    wanted = getattr(case, "backend", "auto")
    return wanted if wanted in PREFILL_BACKENDS else "auto"


def _dims(case: Namespace) -> dict[str, int]:
    return {
        "num_qo_heads": case.num_qo_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim_qk": case.head_dim_qk,
        "head_dim_vo": case.head_dim_vo,
    }


def _dtypes(case: Namespace) -> dict[str, torch.dtype]:
    return {"q_data_type": torch_dtype(case.q_dtype), "kv_data_type": torch_dtype(case.kv_dtype)}


class _Pages:
    """A page table, every page in a random place, and its cache."""

    def __init__(self, case: Namespace, kv_len: torch.Tensor, device: str) -> None:
        counts = (kv_len + case.page_size - 1) // case.page_size
        self.indptr = _indptr(counts)
        self.indices = torch.randperm(int(self.indptr[-1])).int().to(device)
        self.last_page_len = (kv_len - 1) % case.page_size + 1
        inner = (case.page_size, case.num_kv_heads)
        shape = (int(self.indptr[-1]), *(inner[::-1] if case.hnd else inner))
        dtype = torch_dtype(case.kv_dtype)
        self.cache = tuple(
            make_tensor(*shape, dim, dtype=dtype, device=device)
            for dim in (case.head_dim_qk, case.head_dim_vo)
        )
        self.kv_layout = "HND" if case.hnd else "NHD"


def _build_decode(case: Namespace, device: str) -> Arguments:
    if case.head_dim_qk != case.head_dim_vo:
        raise ValueError(
            "--head_dim_vo must be --head_dim_qk for decode, whose plan takes one head size, "
            f"got {case.head_dim_vo} and {case.head_dim_qk}"
        )
    _, kv_len = lengths(case)
    pages = _Pages(case, kv_len, device)
    wrapper = _planned(
        _wrapper(
            "decode",
            "BatchDecodeWithPagedKVCacheWrapper",
            float_workspace_buffer=_workspace(device),
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
        **_dtypes(case),
    )
    queries = _queries(case, case.batch_size, device)
    return {"self": wrapper, **queries, "paged_kv_cache": pages.cache}


def _build_paged(case: Namespace, device: str) -> Arguments:
    qo_len, kv_len = lengths(case)
    pages = _Pages(case, kv_len, device)
    wrapper = _planned(
        _wrapper(
            "prefill",
            "BatchPrefillWithPagedKVCacheWrapper",
            float_workspace_buffer=_workspace(device),
            kv_layout=pages.kv_layout,
            backend=_backend(case),
        ),
        device,
        qo_indptr=_indptr(qo_len),
        paged_kv_indptr=pages.indptr,
        paged_kv_indices=pages.indices,
        paged_kv_last_page_len=pages.last_page_len,
        page_size=case.page_size,
        causal=case.causal,
        o_data_type=_result_dtype(case),
        **_dims(case),
        **_dtypes(case),
    )
    queries = _queries(case, int(qo_len.sum()), device)
    return {"self": wrapper, **queries, "paged_kv_cache": pages.cache}


def _build_mixed(case: Namespace, device: str) -> Arguments:
    qo_len, kv_len = lengths(case)
    pages = _Pages(case, kv_len, device)
    wrapper = _planned(
        _wrapper(
            "attention",
            "BatchAttention",
            kv_layout=pages.kv_layout,
            device=device,
            backend=_backend(case),
        ),
        device,
        qo_indptr=_indptr(qo_len),
        kv_indptr=pages.indptr,
        kv_indices=pages.indices,
        kv_len_arr=kv_len,
        page_size=case.page_size,
        causal=case.causal,
        **_dims(case),
        **_dtypes(case),
    )
    queries = _queries(case, int(qo_len.sum()), device)
    return {"self": wrapper, **queries, "kv_cache": pages.cache}


def _build_ragged(case: Namespace, device: str) -> Arguments:
    qo_len, kv_len = lengths(case)
    wrapper = _planned(
        _wrapper(
            "prefill",
            "BatchPrefillWithRaggedKVCacheWrapper",
            float_workspace_buffer=_workspace(device),
            backend=_backend(case),
        ),
        device,
        qo_indptr=_indptr(qo_len),
        kv_indptr=_indptr(kv_len),
        causal=case.causal,
        o_data_type=_result_dtype(case),
        **_dims(case),
        **_dtypes(case),
    )
    queries = _queries(case, int(qo_len.sum()), device)
    return {"self": wrapper, **queries, **_keys(case, int(kv_len.sum()), device)}


def _keys(case: Namespace, tokens: int, device: str) -> Arguments:
    dtype = torch_dtype(case.kv_dtype)
    dims = {"k": case.head_dim_qk, "v": case.head_dim_vo}
    return {
        name: make_tensor(tokens, case.num_kv_heads, dim, dtype=dtype, device=device)
        for name, dim in dims.items()
    }


def _build_single_prefill(case: Namespace, device: str) -> Arguments:
    q = _queries(case, case.s_qo, device)["q"]
    options = {"causal": case.causal, "backend": _backend(case), "o_dtype": _result_dtype(case)}
    return {"q": q, **_keys(case, case.s_kv, device), **options}


def _build_single_decode(case: Namespace, device: str) -> Arguments:
    q = _queries(case, 1, device)["q"][0]
    return {"q": q, **_keys(case, case.s_kv, device)}


def _cache_bytes(name: str) -> Callable[[Arguments], int]:
    """Bytes of the cached tokens: the rest of a last page is not read."""

    def count(arguments: Arguments) -> int:
        problem = arguments["self"]._problem
        rows = int(problem.kv_lengths().sum()) * problem.num_kv_heads
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


_PAGED = [*_BATCH, _QO, _KV, *_HEADS, *_PAGES, _CAUSAL]
_register_wrapper(
    "decode",
    "BatchDecodeWithPagedKVCacheWrapper",
    _build_decode,
    [*_BATCH, _KV, *_HEADS, *_PAGES],
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
    [*_BATCH, _QO, _KV, *_HEADS, _CAUSAL],
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
_register_single("decode", "single_decode_with_kv_cache", _build_single_decode, [_KV, *_HEADS])
_register_single(
    "prefill",
    "single_prefill_with_kv_cache",
    _build_single_prefill,
    [_QO, _KV, *_HEADS, _CAUSAL],
    flops=_flops,
    backends=PREFILL_BACKENDS,
    peers={"torch": Backend(torch_attention, omits=["backend", "o_dtype"])},
)
