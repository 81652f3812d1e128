"""Inputs of attention: flags, page tables, tensors, and wrappers that have planned."""

from __future__ import annotations

import contextlib
import importlib
from argparse import Namespace
from typing import Any

import torch

import flashinfer
from flashinfer.testing import make_tensor

from .base import Arguments, Flag, dtype_name, positive, torch_dtype

PREFILL_BACKENDS = ("auto", "fa2", "fa3")
_WORKSPACE_BYTES = 256 << 20  # more than any plan of a benchmark needs


HEADS = [
    Flag("num_qo_heads", positive, 32, "heads of queries and results"),
    Flag("num_kv_heads", positive, 8, "heads of keys and values"),
    Flag("head_dim_qk", positive, 128, "elements of a head of queries and keys"),
    Flag("head_dim_vo", positive, 128, "elements of a head of values and results"),
    Flag("q_dtype", dtype_name, "bfloat16", "dtype of queries; results of 8 bits are bfloat16"),
    Flag("kv_dtype", dtype_name, "bfloat16", "dtype of keys and values"),
]
PAGES = [
    Flag("page_size", positive, 16, "tokens of a page"),
    Flag("hnd", bool, False, "heads before tokens in the cache"),
]
CAUSAL = Flag("causal", bool, False, "a query sees no key behind it; aligned to the end")


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def indptr_of(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([int32([0]), counts.cumsum(0, dtype=torch.int32)])


def make_wrapper(module: str, name: str, **arguments: Any) -> Any:
    return getattr(importlib.import_module(f"flashinfer.{module}"), name)(**arguments)


def planned(wrapper: Any, device: str, **arguments: Any) -> Any:
    """The wrapper after its plan. Without a GPU it is one for the reference backend."""
    on_gpu = torch.device(device).type == "cuda"
    with contextlib.nullcontext() if on_gpu else flashinfer.reference_backend():
        wrapper.plan(**arguments)
    return wrapper


def workspace_on(device: str) -> torch.Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def query_tensors(case: Namespace, tokens: int, device: str) -> Arguments:
    """The queries and where the results go."""
    dtype, shape = torch_dtype(case.q_dtype), (tokens, case.num_qo_heads)
    q = make_tensor(*shape, case.head_dim_qk, dtype=dtype, device=device)
    return {"q": q, "out": q.new_empty(*shape, case.head_dim_vo, dtype=result_dtype(case))}


def result_dtype(case: Namespace) -> torch.dtype:
    dtype = torch_dtype(case.q_dtype)
    return dtype if dtype.itemsize > 1 else torch.bfloat16


def backend_of(case: Namespace) -> str:
    """What the wrapper or function is told; nothing where a peer is timed."""
    wanted = getattr(case, "backend", "auto")
    return wanted if wanted in PREFILL_BACKENDS else "auto"


def dims_of(case: Namespace) -> dict[str, int]:
    return {
        "num_qo_heads": case.num_qo_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim_qk": case.head_dim_qk,
        "head_dim_vo": case.head_dim_vo,
    }


def types_of(case: Namespace) -> dict[str, torch.dtype]:
    return {"q_data_type": torch_dtype(case.q_dtype), "kv_data_type": torch_dtype(case.kv_dtype)}


class PageTable:
    """A page table, every page in a random place, and its cache."""

    def __init__(self, case: Namespace, kv_len: torch.Tensor, device: str) -> None:
        counts = (kv_len + case.page_size - 1) // case.page_size
        self.indptr = indptr_of(counts)
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


def key_tensors(case: Namespace, tokens: int, device: str) -> Arguments:
    dtype = torch_dtype(case.kv_dtype)
    dims = {"k": case.head_dim_qk, "v": case.head_dim_vo}
    return {
        name: make_tensor(tokens, case.num_kv_heads, dim, dtype=dtype, device=device)
        for name, dim in dims.items()
    }


def check_one_head_dim(case: Namespace, what: str) -> None:
    """Refuse two head sizes where a plan takes one."""
    if case.head_dim_qk != case.head_dim_vo:
        raise ValueError(
            f"--head_dim_vo must be --head_dim_qk for {what}, whose plan takes one head size, "
            f"got {case.head_dim_vo} and {case.head_dim_qk}"
        )
