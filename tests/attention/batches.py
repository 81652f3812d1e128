"""Random batches of attention, and their comparison with the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._attention.plan.choice import is_hopper
from flashinfer.testing import assert_matches_reference
from flashinfer.testing.attention import attention_check_options
from flashinfer.trace.template import resolve_template

WORKSPACE_BYTES = 64 << 20
FORMS = ("tuple", "fused", "strided")  # the last: parts of one wider tensor
BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = (E4M3, E5M2)


def workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def need_backend(backend: str, device: torch.device) -> None:
    """Skip a test of the kernel for Hopper on another GPU; without one, the reference is both."""
    if backend != "fa3" or device.type != "cuda":
        return
    if not is_hopper(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs a GPU of compute capability 9.0 for backend fa3")


def randn(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=device).to(dtype)


def indptr(lengths: Sequence[int]) -> torch.Tensor:
    """[0, l_0, l_0 + l_1, ...] int32 on the host."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Shapes of one batch; what of them selects a kernel is dtypes, head sizes and row counts."""

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_kv_heads: int = 2
    group: int = 4
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    o_dtype: torch.dtype | None = None
    page_size: int = 16
    kv_layout: str = "NHD"
    form: str = "tuple"  # of the cache: FORMS, or "tokens" for pages of one
    seed: int = 1

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def stored(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    def query(self, device: torch.device) -> torch.Tensor:
        shape = (sum(self.qo_lens), self.num_qo_heads, self.head_dim_qk)
        return randn(shape, self.dtype, device, self.seed)

    def dtypes(self) -> dict[str, torch.dtype]:
        types = {"q_data_type": self.dtype, "kv_data_type": self.stored}
        return types if self.o_dtype is None else {**types, "o_data_type": self.o_dtype}

    # ---- pages ---------------------------------------------------------------------------------

    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """indptr, indices, last_page_len on the host, and the pages of a cache with some to spare.

        Pages lie in random order; a request of length 0 has none.
        """
        counts = [-(-n // self.page_size) for n in self.kv_lens]
        num_pages = sum(counts) + 3
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(self.seed))
        last = [
            n - (c - 1) * self.page_size if c else 0
            for n, c in zip(self.kv_lens, counts, strict=True)
        ]
        indices = order[: sum(counts)].to(torch.int32)
        return indptr(counts), indices, torch.tensor(last, dtype=torch.int32), num_pages

    def cache(self, device: torch.device) -> Any:
        """Keys and values in pages; slots that belong to no request hold NaN."""
        starts, indices, last, num_pages = self.table()
        free = torch.ones(num_pages, self.page_size, dtype=torch.bool)
        for b in range(len(self.kv_lens)):
            pages = indices[starts[b] : starts[b + 1]].long()
            free[pages] = False
            if len(pages):
                free[pages[-1], int(last[b]) :] = True
        parts = []
        for i, head_dim in enumerate((self.head_dim_qk, self.head_dim_vo)):
            shape = (num_pages, self.page_size, self.num_kv_heads, head_dim)
            values = randn(shape, torch.float32, device, self.seed + 7 + i)
            values[free.to(device)] = float("nan")
            stored = values.to(self.stored)
            parts.append(stored if self.kv_layout == "NHD" else stored.transpose(1, 2).contiguous())
        if self.form == "fused":
            return torch.stack(parts, 1)
        if self.form == "strided":
            return tuple(_widened(part) for part in parts)
        if self.form == "tokens":
            return tuple(part.squeeze(1 if self.kv_layout == "NHD" else 2) for part in parts)
        return tuple(parts)


def _widened(part: torch.Tensor) -> torch.Tensor:
    """The same values with 16 elements more per row and one page more per page between them."""
    pages, *inner, dim = part.shape
    wide = part.new_empty(2 * pages, *inner, dim + 16)
    wide.view(torch.uint8).fill_(0x7F)  # NaN, or large, in every type
    view = wide[::2, ..., :dim]
    view.copy_(part)
    return view


# ---- wrappers ----------------------------------------------------------------------------------


def plan_decode(batch: Batch, device: torch.device, **options: Any) -> Any:
    """A planned wrapper of one query (or `q_len_per_req`) per request."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), batch.kv_layout)
    starts, indices, last, _ = batch.table()
    assert batch.head_dim_qk == batch.head_dim_vo
    wrapper.plan(
        *(starts, indices.to(device), last, batch.num_qo_heads, batch.num_kv_heads),
        *(batch.head_dim_qk, batch.page_size),
        **batch.dtypes(),
        **options,
    )
    return wrapper


def plan_paged(batch: Batch, device: torch.device, backend: str = "auto", **options: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), batch.kv_layout, backend=backend
    )
    starts, indices, last, _ = batch.table()
    wrapper.plan(
        *(indptr(batch.qo_lens), starts, indices.to(device), last),
        *(batch.num_qo_heads, batch.num_kv_heads, batch.head_dim_qk, batch.page_size),
        head_dim_vo=batch.head_dim_vo,
        **batch.dtypes(),
        **options,
    )
    return wrapper


def plan_ragged(batch: Batch, device: torch.device, backend: str = "auto", **options: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), batch.kv_layout, backend=backend
    )
    wrapper.plan(
        *(indptr(batch.qo_lens), indptr(batch.kv_lens)),
        *(batch.num_qo_heads, batch.num_kv_heads, batch.head_dim_qk),
        head_dim_vo=batch.head_dim_vo,
        **batch.dtypes(),
        **options,
    )
    return wrapper


def ragged_kv(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (sum(batch.kv_lens), batch.num_kv_heads)
    k = randn((*rows, batch.head_dim_qk), batch.stored, device, batch.seed + 7)
    v = randn((*rows, batch.head_dim_vo), batch.stored, device, batch.seed + 8)
    if batch.kv_layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    return k, v


def check_paged(wrapper: Any, batch: Batch, device: torch.device, **run: Any) -> dict[str, Any]:
    """`run` with and without LSE, against the reference."""
    arguments = {"q": batch.query(device), "paged_kv_cache": batch.cache(device), **run}
    return check(type(wrapper).run, self=wrapper, return_lse=True, **arguments)


def check_ragged(wrapper: Any, batch: Batch, device: torch.device, **run: Any) -> dict[str, Any]:
    k, v = ragged_kv(batch, device)
    arguments = {"q": batch.query(device), "k": k, "v": v, **run}
    return check(type(wrapper).run, self=wrapper, return_lse=True, **arguments)


def check(api: Any, **arguments: Any) -> dict[str, Any]:
    """One call against the reference of its template, within rounding."""
    if not arguments["q"].is_cuda:  # the reference against itself
        return assert_matches_reference(api, **arguments)
    template = resolve_template(api.__flashinfer_trace__, arguments)
    assert template is not None
    return assert_matches_reference(api, attention_check_options(template, arguments), **arguments)
