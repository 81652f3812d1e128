"""The kernel's module under FlashInfer's name, and the module that engines plan with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._attention.plan.no_kernel import NO_MODULE, is_computed_from_plans
from ..jit.attention.mla import MlaPlanner, get_mla_module_of, mla_config

__all__ = ["get_batch_mla_module"]


def get_batch_mla_module(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_ckv: int,
    head_dim_kpe: int,
    use_profiler: bool,
) -> Any:
    """The loaded module with ``mla_run``, compiled if need be.

    Parameters
    ----------
    backend, dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_ckv, head_dim_kpe, use_profiler
        As for ``flashinfer.jit.gen_batch_mla_module``.

    Raises
    ------
    ValueError
        If there is no kernel for them.
    """
    types = (dtype_q, dtype_kv, dtype_o, dtype_idx)
    config = mla_config(backend, *types, head_dim_ckv, head_dim_kpe, use_profiler)
    return get_mla_module_of(config)


class PlannedModule:
    """Plans again for a captured graph; engines call it ``_cached_module``.

    Parameters
    ----------
    plan_again : callable
        Takes `qo_indptr`, `kv_indptr`, `kv_len_arr` and the tuple of the last three arguments.
    """

    def __init__(self, plan_again: Callable[..., None]) -> None:
        self._plan_again = plan_again

    def plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        pin_memory_int_workspace_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        causal: bool,
    ) -> None:
        """Plan the wrapper's next launches with the options of its latest ``plan``.

        Page numbers stay where they are: the caller has written them to the wrapper's buffer.

        Raises
        ------
        ValueError
            If the wrapper has no plan yet, or its plan has other heads or another mask.
        """
        self._plan_again(qo_indptr, kv_indptr, kv_len_arr, (num_heads, head_dim_ckv, causal))


def planner_if_any() -> MlaPlanner | None:
    """A planner; None where there is none and a reference computes, which needs its checks alone.

    Raises
    ------
    flashinfer.jit.JitError
        If the planner can be neither found nor compiled, and a kernel would need it.
    """
    try:
        return MlaPlanner()
    except NO_MODULE:
        if not is_computed_from_plans():
            raise
        return None


def without_gpu(*_: Any) -> None:
    """Refuse a workspace on the CPU, in the place of the kernel."""
    raise ValueError(
        "`float_workspace_buffer` must be a CUDA tensor, got one on the CPU; without a GPU: "
        "FLASHINFER_BACKEND=reference"
    )
