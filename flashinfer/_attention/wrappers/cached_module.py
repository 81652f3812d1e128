"""The planning entry of a module, for engines that have every length on the host.

SGLang replays the CUDA graphs of speculative decoding with it: it fills the wrapper's buffers on
the GPU itself and hands over the lengths that it has on the host, so that nothing is fetched.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..checks import check_window
from ..index_tensors import check_fits, host_indices
from ..plan.requests import AttentionProblem, ItemScoring


class PagedPlanModule:
    """The `_cached_module` of a planned prefill wrapper over pages."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        pin_memory_int_workspace_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len: torch.Tensor,
        max_total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        use_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int = -1,
        disable_split_kv: bool = False,
        num_colocated_ctas: int = 0,
        uniform_q_len: int = 0,
    ) -> list[int]:
        """Plan another batch of the same options; the GPU's buffers are the caller's to fill.

        Parameters
        ----------
        float_workspace_buffer, int_workspace_buffer : torch.Tensor
            The wrapper's own.
        pin_memory_int_workspace_buffer : torch.Tensor
            Not used: the planner has its own.
        qo_indptr, kv_indptr, kv_len : torch.Tensor
            ``[batch_size + 1]``, ``[batch_size + 1]`` and ``[batch_size]``, int32 or int64, on the
            host: query rows, entries of the page table and tokens of each request.
        max_total_num_rows : int
            At least ``qo_indptr[-1]``; the room in a CUDA graph is that of its first plan.
        num_qo_heads, num_kv_heads, page_size, head_dim_qk, head_dim_vo, use_cuda_graph
            They are as in the last ``plan``.
        causal, window_left, fixed_split_size, disable_split_kv
            As for ``plan``; a custom mask stays, and is read from the wrapper's buffers.
        num_colocated_ctas, uniform_q_len : int
            0, or the one length of all queries.

        Returns
        -------
        list of int
            The query rows and the requests; callers keep it as `_plan_info`.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, or lengths contradict each other.
        """
        wrapper = self._wrapper
        spec, requests, tensors = wrapper._plan_problem
        same = {
            "num_qo_heads": (num_qo_heads, spec.num_qo_heads),
            "num_kv_heads": (num_kv_heads, spec.num_kv_heads),
            "page_size": (page_size, requests.page_size),
            "head_dim_qk": (head_dim_qk, spec.head_dim_qk),
            "head_dim_vo": (head_dim_vo, spec.head_dim_vo),
            "use_cuda_graph": (use_cuda_graph, wrapper.is_cuda_graph_enabled),
            "num_colocated_ctas": (num_colocated_ctas, 0),
        }
        for name, (given, planned) in same.items():
            if given != planned:
                raise ValueError(f"`{name}` must be {planned} as in plan(), got {given}")
        _check_workspaces(wrapper, float_workspace_buffer, int_workspace_buffer)
        if isinstance(tensors.mask, ItemScoring):
            raise ValueError("multi-item scoring must be planned by plan(), which has its tensors")
        names = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len": kv_len}
        rows, pages, lengths = host_indices(names)
        _check_counts(names, check_count("batch_size", batch_size, 0))
        check_count("max_total_num_rows", max_total_num_rows, int(rows[-1]))
        if uniform_q_len and rows.diff().ne(uniform_q_len).any():
            raise ValueError(f"`uniform_q_len` must be the length of all queries, got {rows}")
        causal = check_flag("causal", causal) and tensors.mask is None
        window_left = check_window(window_left)
        if (causal, window_left) != (requests.causal, spec.window_left):
            raise ValueError(
                f"`causal` and `window_left` must be {requests.causal} and {spec.window_left} as "
                f"in plan(), got {causal} and {window_left}"
            )
        if wrapper._paged_kv_indices_buf is not None and len(pages):
            check_fits("kv_indptr", torch.empty(int(pages[-1]), device="meta"), tensors.kv_indices)
        requests = requests._replace(
            qo_indptr=rows, kv_indptr=pages, kv_len=lengths, last_page_len=None
        )
        options = wrapper._check_plan_options(fixed_split_size, disable_split_kv)
        options = options._replace(capacity=wrapper._plan_options.capacity)
        wrapper._plan(AttentionProblem(spec, requests, tensors), options)
        return [int(rows[-1]), batch_size]


def planned_module(wrapper: Any) -> PagedPlanModule | None:
    """The planner for engines with all lengths on the host; None before the first plan."""
    return None if wrapper._plan_problem is None else PagedPlanModule(wrapper)


def _check_workspaces(wrapper: Any, floats: Any, ints: Any) -> None:
    for name, given, own in (
        ("float_workspace_buffer", floats, wrapper._float_workspace_buffer),
        ("int_workspace_buffer", ints, wrapper._int_workspace_buffer),
    ):
        if not isinstance(given, torch.Tensor) or given.data_ptr() != own.data_ptr():
            raise ValueError(f"`{name}` must be the wrapper's own, got {type(given).__name__}")


def _check_counts(tensors: dict[str, torch.Tensor], batch_size: int) -> None:
    for name, tensor in tensors.items():
        count = batch_size + (name != "kv_len")
        if tensor.numel() != count:
            raise ValueError(
                f"`{name}` must have {count} elements for {batch_size} requests, got "
                f"{tensor.numel()}"
            )
