"""Attention over a shared prefix, of prefill and decode side by side, and over blocks of keys."""

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace
from typing import Any

import torch

from flashinfer.testing import CheckOptions
from flashinfer.testing.attention import attention_check_options
from flashinfer.testing.flops import attention_flops
from flashinfer.testing.numerics import ErrorBound, unit_roundoff

from .attention_inputs import (
    CAUSAL,
    HEADS,
    PAGES,
    PREFILL_BACKENDS,
    PageTable,
    backend_of,
    check_one_head_dim,
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
from .base import Arguments, Backend, Flag, Routine, positive, register

_PREFIX = Flag("s_prefix", positive, 4096, "tokens of the prefix that all requests share")
_OWN = [
    Flag("batch_size", positive, 64, "requests"),
    Flag("s_qo", positive, 1, "query tokens of a request"),
    Flag("s_kv", positive, 256, "tokens of its own keys and values, queries included"),
]
_PARTS = [
    Flag("s_qo", positive, 1024, "query tokens of the prompt"),
    Flag("s_kv", positive, 1024, "tokens of its keys and values, queries included"),
    Flag("batch_size", positive, 64, "requests that decode"),
    Flag("decode_s_kv", positive, 4096, "tokens of their keys and values"),
]
_BLOCKS = [
    Flag("s_qo", positive, 4096, "query tokens"),
    Flag("s_kv", positive, 4096, "tokens of keys and values"),
    Flag("block_rows", positive, 64, "query tokens of a block; divides s_qo"),
    Flag("block_columns", positive, 64, "tokens of keys of a block; divides s_kv"),
    Flag("blocks_per_row", positive, 16, "blocks of keys that a block of queries sees"),
]


# ---- How closely results must agree ----


@dataclasses.dataclass(frozen=True)
class _TokenBound(ErrorBound):
    """An error bound with a part for each token."""

    of_token: torch.Tensor | None = None

    def systematic(self, expected: torch.Tensor) -> torch.Tensor:
        assert self.of_token is not None
        return super().systematic(expected) + self.of_token.to(expected)[:, None, None]


@dataclasses.dataclass(frozen=True)
class _Averages(CheckOptions):
    """Results are averages of as many values, of deviation 1, as a token sees keys.

    Logits of these inputs have the deviation 1 too, so that the root of the sum of the squares of n
    weights is sqrt(e / n). Eight times the rounding of a weight bounds what its errors add up to.
    """

    keys: tuple[torch.Tensor, ...] = ()  # that each token sees, of each output

    def bound_for(self, output: torch.Tensor, arguments: Any) -> ErrorBound:
        unit = unit_roundoff(output.dtype)
        deviations = [(math.e / n).sqrt() for n in self.keys if len(n) == len(output)]
        largest = torch.stack(deviations).amax(0)
        return _TokenBound(1.01 * unit, 2.0**-16, 2.0**-20, of_token=8 * unit * largest)


def _seen(s_qo: int, s_kv: int, causal: bool) -> torch.Tensor:
    """Keys that each query of a request sees."""
    if not causal:
        return torch.full((s_qo,), s_kv)
    return (torch.arange(s_qo) + 1 + s_kv - s_qo).clamp(min=1)


def _token_bytes(tokens: int, cache: tuple[torch.Tensor, torch.Tensor], heads: int) -> int:
    """Bytes of the keys and values of tokens."""
    return tokens * heads * sum(part.shape[-1] * part.element_size() for part in cache)


def _sizes(case: Namespace) -> dict[str, int]:
    return {
        "num_qo_heads": case.num_qo_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim_qk,
    }


# ---- A prefix that requests share ----


def _build_cascade(case: Namespace, device: str) -> Arguments:
    check_one_head_dim(case, "a cascade")
    pages = PageTable(case, int32([case.s_prefix] + [case.s_kv] * case.batch_size), device)
    first = int(pages.indptr[1])
    wrapper = planned(
        make_wrapper(
            "cascade",
            "MultiLevelCascadeAttentionWrapper",
            num_levels=2,
            float_workspace_buffer=workspace_on(device),
            kv_layout=pages.kv_layout,
            backend=backend_of(case),
        ),
        device,
        qo_indptr_arr=[
            int32([0, case.batch_size * case.s_qo]),
            indptr_of(int32([case.s_qo] * case.batch_size)),
        ],
        paged_kv_indptr_arr=[pages.indptr[:2], pages.indptr[1:] - first],
        paged_kv_indices_arr=[pages.indices[:first], pages.indices[first:]],
        paged_kv_last_page_len=[pages.last_page_len[:1], pages.last_page_len[1:]],
        page_size=case.page_size,
        causal=case.causal,
        **_sizes(case),
        **types_of(case),
    )
    q = query_tensors(case, case.batch_size * case.s_qo, device)["q"]
    return {"self": wrapper, "q": q, "paged_kv_cache": pages.cache}


def _cascade_bytes(arguments: Arguments) -> int:
    """Bytes of both levels' tokens, and of the result."""
    problems = [wrapper._problem for wrapper in arguments["self"]._wrappers]
    tokens = sum(int(problem.requests.kv_lengths().sum()) for problem in problems)
    heads = problems[0].spec.num_kv_heads
    q: torch.Tensor = arguments["q"]
    return q.nbytes + _token_bytes(tokens, arguments["paged_kv_cache"], heads)


def _check_cascade(_: Any, arguments: Arguments) -> CheckOptions:
    shared, own = (wrapper._problem for wrapper in arguments["self"]._wrappers)
    pairs = zip(own.requests.qo_lengths().tolist(), own.requests.kv_lengths().tolist(), strict=True)
    seen = torch.cat([_seen(s_qo, s_kv, own.spec.causal) for s_qo, s_kv in pairs])
    return _Averages(keys=(int(shared.requests.kv_lengths()[0]) + seen,))


def _cascade_flops(case: Namespace) -> int:
    heads = (case.head_dim_qk, case.head_dim_vo, case.num_qo_heads)
    own = attention_flops(case.batch_size, case.s_qo, case.s_kv, *heads, case.causal)
    return own + attention_flops(case.batch_size, case.s_qo, case.s_prefix, *heads, False)


# ---- Prefill and decode side by side ----


def _build_pod(case: Namespace, device: str) -> Arguments:
    check_one_head_dim(case, "POD attention")
    pages = PageTable(case, int32([case.decode_s_kv] * case.batch_size), device)
    wrapper = planned(
        make_wrapper(
            "pod",
            "PODWithPagedKVCacheWrapper",
            float_workspace_buffer=workspace_on(device),
            kv_layout=pages.kv_layout,
        ),
        device,
        indptr=pages.indptr,
        indices=pages.indices,
        last_page_len=pages.last_page_len,
        page_size=case.page_size,
        **_sizes(case),
        **types_of(case),
    )
    prompt = key_tensors(case, case.s_kv, device)
    return {
        "self": wrapper,
        "q_p": query_tensors(case, case.s_qo, device)["q"],
        "k_p": prompt["k"],
        "v_p": prompt["v"],
        "q_d": query_tensors(case, case.batch_size, device)["q"],
        "paged_kv_cache_d": pages.cache,
        "causal_p": case.causal,
    }


def _pod_bytes(arguments: Arguments) -> int:
    """Bytes of the decoding requests' tokens, and of both results."""
    problem = arguments["self"]._base
    tokens = int(problem.requests.kv_lengths().sum())
    results: int = arguments["q_p"].nbytes + arguments["q_d"].nbytes
    return results + _token_bytes(tokens, arguments["paged_kv_cache_d"], problem.spec.num_kv_heads)


def _check_pod(_: Any, arguments: Arguments) -> CheckOptions:
    prompt = _seen(len(arguments["q_p"]), len(arguments["k_p"]), arguments["causal_p"])
    return _Averages(keys=(prompt, arguments["self"]._base.requests.kv_lengths()))


def _pod_flops(case: Namespace) -> int:
    heads = (case.head_dim_qk, case.head_dim_vo, case.num_qo_heads)
    prompt = attention_flops(1, case.s_qo, case.s_kv, *heads, case.causal)
    return prompt + attention_flops(case.batch_size, 1, case.decode_s_kv, *heads, False)


# ---- Blocks of keys ----


def _build_sparse(case: Namespace, device: str) -> Arguments:
    check_one_head_dim(case, "block-sparse attention")
    for tokens, block, name in (
        (case.s_qo, case.block_rows, "block_rows"),
        (case.s_kv, case.block_columns, "block_columns"),
    ):
        if tokens % block:
            raise ValueError(f"--{name} must divide the {tokens} tokens, got {block}")
    rows, columns = case.s_qo // case.block_rows, case.s_kv // case.block_columns
    count = min(case.blocks_per_row, columns)
    wrapper = planned(
        make_wrapper(
            "sparse",
            "BlockSparseAttentionWrapper",
            float_workspace_buffer=workspace_on(device),
            backend=backend_of(case),
        ),
        device,
        indptr=torch.arange(rows + 1, dtype=torch.int32) * count,
        indices=torch.rand(rows, columns).topk(count).indices.sort().values.flatten().int(),
        **dict(M=case.s_qo, N=case.s_kv, R=case.block_rows, C=case.block_columns),
        o_data_type=result_dtype(case),
        **_sizes(case),
        **types_of(case),
    )
    tensors = {**query_tensors(case, case.s_qo, device), **key_tensors(case, case.s_kv, device)}
    return {"self": wrapper, **tensors}


def _sparse_flops(case: Namespace) -> int:
    seen = min(case.blocks_per_row * case.block_columns, case.s_kv)
    heads = (case.head_dim_qk, case.head_dim_vo, case.num_qo_heads)
    return attention_flops(1, case.s_qo, seen, *heads, False)


_CASCADE = "flashinfer.cascade:MultiLevelCascadeAttentionWrapper.run"
register(
    Routine(
        name="MultiLevelCascadeAttentionWrapper",
        api=_CASCADE,
        flags=[*_OWN, _PREFIX, *HEADS, *PAGES, CAUSAL],
        build=_build_cascade,
        reads=["q"],
        writes=[],
        fresh=_cascade_bytes,
        flops=_cascade_flops,
        check_options=_check_cascade,
        backends={backend: Backend(_CASCADE) for backend in PREFILL_BACKENDS},
    )
)
register(
    Routine(
        name="PODWithPagedKVCacheWrapper",
        api="flashinfer.pod:PODWithPagedKVCacheWrapper.run",
        flags=[*_PARTS, *HEADS, *PAGES, CAUSAL],
        build=_build_pod,
        reads=["q_p", "k_p", "v_p", "q_d"],
        writes=[],
        fresh=_pod_bytes,
        flops=_pod_flops,
        check_options=_check_pod,
        backends={"fa2": Backend("flashinfer.pod:PODWithPagedKVCacheWrapper.run")},
    )
)
_SPARSE = "flashinfer.sparse:BlockSparseAttentionWrapper.run"
register(
    Routine(
        name="BlockSparseAttentionWrapper",
        api=_SPARSE,
        flags=[*_BLOCKS, *HEADS],
        build=_build_sparse,
        reads=["q", "k", "v"],
        writes=["out"],
        flops=_sparse_flops,
        check_options=attention_check_options,
        backends={backend: Backend(_SPARSE) for backend in PREFILL_BACKENDS},
    )
)
