"""What the wrappers of block-sparse attention share."""

from __future__ import annotations

from typing import Any

import torch

from ..._instrument.decorator import flashinfer_api
from ...jit.attention.plan import PREFILL
from ..checks import check_count, refuse
from ..plan.masks import add_mask
from ..plan.problem import AttentionProblem
from .base import AttentionWrapper
from .sparse_checks import refuse_positions
from .sparse_tables import SparseTable


class SparseWrapper(AttentionWrapper):
    """What the two kinds of blocks share."""

    @flashinfer_api
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, "NHD", False, backend, None)

    def _plan_table(
        self,
        table: SparseTable,
        mask: tuple[torch.Tensor | None, torch.Tensor | None],
        non_blocking: bool,
        options: dict[str, Any],
    ) -> None:
        """`mask`: bools by row of blocks, or packed bits."""
        problem = AttentionProblem(
            qo_indptr=table.qo_indptr,
            kv_indptr=table.kv_indptr,
            kv_len=table.kv_len,
            kv_indices=table.kv_indices,
            page_size=table.page_size,
            causal=table.causal,
            names=PREFILL,
            **options,
        )
        if table.packed_mask is not None:
            mask = (None, table.packed_mask)
        if mask != (None, None):
            add_mask(problem, *mask, self.device)
        self._plan(problem, None, False, non_blocking, None)

    def _sparse_options(
        self,
        heads: tuple[int, int, int],
        pos_encoding_mode: str,
        use_fp16_qk_reduction: bool,
        options: tuple[float | None, float | None, float | None, float | None],
        dtypes: tuple[Any, Any, Any],
    ) -> dict[str, Any]:
        """`options`: logits_soft_cap, sm_scale, rope_scale, rope_theta."""
        refuse_positions(pos_encoding_mode)
        refuse("sums are in float32", use_fp16_qk_reduction=use_fp16_qk_reduction)
        num_qo_heads, num_kv_heads, head_dim = heads
        check_count("head_dim", head_dim)
        sizes = (num_qo_heads, num_kv_heads, head_dim, head_dim)
        return self._options(*sizes, pos_encoding_mode, -1, *options, dtypes)

    def _override_sparse(
        self, pos_encoding_mode: str, use_fp16_qk_reduction: bool, options: tuple[Any, ...]
    ) -> None:
        """Of forward(); `options`: logits_soft_cap, sm_scale, rope_scale, rope_theta."""
        refuse_positions(pos_encoding_mode)
        refuse("sums are in float32", use_fp16_qk_reduction=use_fp16_qk_reduction)
        names = ("logits_soft_cap", "sm_scale", "rope_scale", "rope_theta")
        named = dict(zip(names, options, strict=True))
        self._override(pos_encoding_mode=pos_encoding_mode, window_left=-1, **named)

    def _planned(self) -> AttentionProblem:
        if self._problem is None:
            raise ValueError("plan() must be called before run(), and again after new workspaces")
        return self._problem


def grouped(tensor: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``[num_qo_heads, rows, dim]`` as ``[num_kv_heads * rows, group, dim]``, best a view."""
    return tensor.unflatten(0, (num_kv_heads, -1)).transpose(1, 2).flatten(0, 1)


def in_place(result: torch.Tensor, num_kv_heads: int) -> torch.Tensor | None:
    """The result as the kernel writes it, if that is a view."""
    if result.shape[0] != num_kv_heads or not result.is_contiguous():
        return None
    return grouped(result, num_kv_heads)


def deliver(
    mine: torch.Tensor, result: torch.Tensor | None, heads: tuple[int, int]
) -> torch.Tensor:
    """What the kernel wrote in the caller's order, and where the caller wants it."""
    num_qo_heads, num_kv_heads = heads
    if result is not None and mine.data_ptr() == result.data_ptr():
        return result
    ordered = mine.unflatten(0, (num_kv_heads, -1)).transpose(1, 2).flatten(0, 1)
    return ordered if result is None else result.copy_(ordered)
