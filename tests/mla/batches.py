"""Random batches of latent attention, and their comparison with the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.testing import assert_matches_reference
from flashinfer.testing.mla import mla_check_options
from flashinfer.trace.template import resolve_template
from flashinfer.trace.templates.mla import mla_run_trace

BF16, FP16 = torch.bfloat16, torch.float16
WORKSPACE_BYTES = 64 << 20
BACKENDS = ["fa2", "fa3"] if torch.cuda.is_available() else ["auto"]
"""Kernels to test; without a GPU there is one reference for all."""


def need_hopper(device: torch.device) -> None:
    """Skip a test of the kernel for Hopper on another GPU; without one the reference runs."""
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a GPU of compute capability 9.0")


def randn(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=device).to(dtype)


def indptr(lengths: Sequence[int]) -> torch.Tensor:
    """[0, l_0, l_0 + l_1, ...] int32 on the host."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Shapes of one batch."""

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int = 16
    head_dim_ckv: int = 512
    head_dim_kpe: int = 64
    page_size: int = 64
    causal: bool = False
    dtype: torch.dtype = BF16
    seed: int = 1

    def pages(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Indptr and page numbers on the host, and the pages of a cache with some to spare."""
        counts = [-(-n // self.page_size) for n in self.kv_lens]
        num_pages = sum(counts) + 3
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(self.seed))
        return indptr(counts), order[: sum(counts)].to(torch.int32), num_pages

    def cache(self, device: torch.device) -> torch.Tensor:
        """Both parts in one tensor; slots that belong to no request hold NaN."""
        starts, indices, num_pages = self.pages()
        width = self.head_dim_ckv + self.head_dim_kpe
        cache = randn((num_pages, self.page_size, width), self.dtype, device, self.seed + 7)
        free = torch.ones(num_pages, self.page_size, dtype=torch.bool)
        for b, length in enumerate(self.kv_lens):
            own = indices[starts[b] : starts[b + 1]].long()
            free[own] = False
            if len(own):
                free[own[-1], length - (len(own) - 1) * self.page_size :] = True
        cache[free.to(device)] = float("nan")
        return cache

    def query(self, device: torch.device) -> torch.Tensor:
        width = self.head_dim_ckv + self.head_dim_kpe
        return randn((sum(self.qo_lens), self.num_heads, width), self.dtype, device, self.seed)

    def plan(
        self, wrapper: BatchMLAPagedAttentionWrapper, sm_scale: float = 192**-0.5, **changes: Any
    ) -> None:
        starts, indices, _ = self.pages()
        lengths = torch.tensor(self.kv_lens, dtype=torch.int32)
        wrapper.plan(
            *(indptr(self.qo_lens), starts, indices.to(wrapper.device), lengths, self.num_heads),
            *(self.head_dim_ckv, self.head_dim_kpe, self.page_size, self.causal, sm_scale),
            self.dtype,
            **{"kv_data_type": self.dtype, **changes},
        )

    def arguments(self, device: torch.device) -> dict[str, Any]:
        query, cache = self.query(device), self.cache(device)
        at = self.head_dim_ckv
        parts = {"q_nope": query[..., :at], "ckv_cache": cache[..., :at]}
        if self.head_dim_kpe:
            parts |= {"q_pe": query[..., at:], "kpe_cache": cache[..., at:]}
        return parts


default_backend = "auto"  # of `make_wrapper`; a fixture may change it


def make_wrapper(device: torch.device, **options: Any) -> BatchMLAPagedAttentionWrapper:
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return BatchMLAPagedAttentionWrapper(workspace, **{"backend": default_backend, **options})


def check(wrapper: BatchMLAPagedAttentionWrapper, **arguments: Any) -> dict[str, torch.Tensor]:
    """Compare one ``run`` with the reference; returns its results."""
    call = {"self": wrapper, **arguments}
    template = resolve_template(mla_run_trace, call)
    assert template is not None
    options = mla_check_options(template, call)
    return assert_matches_reference(BatchMLAPagedAttentionWrapper.run, options, **call)
