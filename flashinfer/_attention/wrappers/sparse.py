"""The base of the wrappers of block-sparse attention."""

import dataclasses
from typing import Any

import torch

from ..._common.checks import count as check_count
from ..._instrument.decorator import flashinfer_constructor
from ..checks import refuse
from ..plan.masks import make_mask
from ..plan.requests import (
    ArgumentNames,
    AttentionProblem,
    CustomMask,
    PlanTensors,
    Requests,
)
from ..plan.spec import AttentionSpec
from .base import AttentionWrapper, SpecArguments
from .sparse_checks import refuse_positions
from .sparse_tables import SparseTable


class SparseWrapper(AttentionWrapper):
    """The base of the two kinds of blocks."""

    @flashinfer_constructor
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, "NHD", False, backend, None)

    def _plan_table(
        self,
        spec: AttentionSpec,
        table: SparseTable,
        non_blocking: bool,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
    ) -> None:
        """Plan the requests of a matrix; `mask`: bools by row of blocks."""
        spec = dataclasses.replace(spec, causal=table.causal)
        requests = Requests(
            ArgumentNames.PREFILL,
            table.qo_indptr,
            table.kv_indptr,
            table.kv_len,
            page_size=table.page_size,
            causal=table.causal,
        )
        problem = AttentionProblem(spec, requests, PlanTensors(table.kv_indices))
        if table.packed_mask is not None:
            mask, packed_mask = None, table.packed_mask
        if mask is not None or packed_mask is not None:
            made: CustomMask = make_mask(requests, mask, packed_mask, self.device)
            problem = problem.with_mask(made)
        self._plan(problem, self._check_plan_options(None, False, non_blocking))

    def _sparse_spec(
        self, head_dim: int, pos_encoding_mode: str, use_fp16_qk_reduction: bool, **options: Any
    ) -> AttentionSpec:
        """The spec of a plan, without causality, from other fields of ``SpecArguments``."""
        refuse_positions(pos_encoding_mode)
        refuse("sums are in float32", use_fp16_qk_reduction=use_fp16_qk_reduction)
        head_dim = check_count("head_dim", head_dim)
        return self._spec(SpecArguments(head_dim_qk=head_dim, head_dim_vo=head_dim, **options))

    def _override_sparse(
        self, pos_encoding_mode: str, use_fp16_qk_reduction: bool, **options: Any
    ) -> None:
        """Options of the deprecated ``forward``."""
        refuse_positions(pos_encoding_mode)
        refuse("sums are in float32", use_fp16_qk_reduction=use_fp16_qk_reduction)
        self._override(pos_encoding_mode=pos_encoding_mode, window_left=-1, **options)

    def _planned_problem(self) -> AttentionProblem:
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


def in_callers_order(
    written: torch.Tensor, result: torch.Tensor | None, heads: tuple[int, int]
) -> torch.Tensor:
    """The kernel's output in the caller's order; it is in `result` if there is one."""
    num_qo_heads, num_kv_heads = heads
    if result is not None and written.data_ptr() == result.data_ptr():
        return result
    ordered = written.unflatten(0, (num_kv_heads, -1)).transpose(1, 2).flatten(0, 1)
    return ordered if result is None else result.copy_(ordered)
