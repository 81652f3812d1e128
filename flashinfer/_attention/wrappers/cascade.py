"""Cascades of shared keys: ``flashinfer.cascade.MultiLevelCascadeAttentionWrapper``."""

from collections.abc import Sequence
from typing import Any

import torch

from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..._common.checks import tensor as check_tensor
from ..._compile.handles import Planned
from ..._instrument.decorator import flashinfer_api, flashinfer_constructor
from ...trace.templates.attention_wrappers import cascade_run_trace
from ..functions.merge import merge_states
from .base import Cache
from .paged import PagedWrapper
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper


class MultiLevelCascadeAttentionWrapper(PagedWrapper, Planned):
    r"""Attention over levels of keys, the upper of which many requests share.

    On each level the query tokens are divided into requests anew, each with pages of its own: on
    the first perhaps one request with the common prefix, on the last one request per user. A query
    attends to its keys on all levels; shared keys are read once for all of its queries.

    Parameters
    ----------
    num_levels : int
        At least 1.
    float_workspace_buffer : torch.Tensor
        For partial results of requests that are split, contiguous, any dtype; the levels use it one
        after the other. 128 MiB are plenty.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    use_cuda_graph : bool
        Whether ``run`` will be captured; see ``BatchPrefillWithPagedKVCacheWrapper``.
    qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr, \
paged_kv_last_page_len_buf_arr : list of torch.Tensor
        With `use_cuda_graph`: the buffers of each level, as of that wrapper.
    backend : str
        Of every level: ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``; see docs/attention.md.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    Z. Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding",
    2024. The levels' outputs are rounded to the dtype of the output before they are merged.

    Examples
    --------
    >>> workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    >>> wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace)
    >>> i32 = dict(dtype=torch.int32)
    >>> qo_indptr = [torch.tensor([0, 3], **i32), torch.tensor([0, 1, 2, 3], **i32)]
    >>> kv_indptr = [torch.tensor([0, 2], **i32), torch.tensor([0, 1, 2, 3], **i32)]
    >>> pages = [torch.tensor([0, 1], **i32).cuda(), torch.tensor([2, 3, 4], **i32).cuda()]
    >>> last = [torch.tensor([16], **i32), torch.tensor([5, 1, 16], **i32)]
    >>> wrapper.plan(qo_indptr, kv_indptr, pages, last, 32, 8, 128, 16)
    >>> cache = torch.randn(5, 2, 16, 8, 128, dtype=torch.float16, device="cuda")
    >>> q = torch.randn(3, 32, 128, dtype=torch.float16, device="cuda")
    >>> out = wrapper.run(q, cache)
    """

    @flashinfer_constructor
    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
        backend: str = "auto",
    ) -> None:
        num_levels = check_count("num_levels", num_levels)
        buffers = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }
        if use_cuda_graph:
            of_levels = list(zip(*_per_level(num_levels, buffers), strict=True))
        else:
            of_levels = [(None,) * len(buffers)] * num_levels
        self._wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph,
                qo_indptr_buf=qo_indptr,
                paged_kv_indptr_buf=kv_indptr,
                paged_kv_indices_buf=kv_indices,
                paged_kv_last_page_len_buf=last_page_len,
                backend=backend,
            )
            for qo_indptr, kv_indptr, kv_indices, last_page_len in of_levels
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for CUDA graphs."""
        return self._wrappers[0].is_cuda_graph_enabled

    @property
    def _runs_in_graphs(self) -> bool:
        return self._wrappers[0].is_cuda_graph_enabled

    @property
    def _planned_results(self) -> tuple[int, torch.dtype] | None:
        return self._wrappers[-1]._planned_results

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor]
    ) -> None:
        """Use other workspaces, from the next ``plan`` on.

        Parameters
        ----------
        float_workspace_buffer : torch.Tensor
            For partial results; contiguous, any dtype.
        int_workspace_buffers : list of torch.Tensor
            For the work list of each level; contiguous, any dtype, on the same device.

        Raises
        ------
        TypeError, ValueError
            If a buffer is not a contiguous tensor, or there is not one for each level.
        """
        named = {"int_workspace_buffers": int_workspace_buffers}
        (buffers,) = _per_level(len(self._wrappers), named)
        for wrapper, buffer in zip(self._wrappers, buffers, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, buffer)

    @flashinfer_api
    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Divide the work of each level over the GPU; any number of runs may follow.

        Parameters
        ----------
        qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len : list
            For each level the index tensors of ``BatchPrefillWithPagedKVCacheWrapper.plan``. All
            levels have the same number of query tokens.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            As there.
        causal : bool
            Whether query i of n on the last level sees keys of it up to ``i + kv_len - n`` only.
            Keys of other levels are seen by all of their queries.
        pos_encoding_mode : str
            ``"NONE"``, unless there is one level: on several, a query has no position.
        use_fp16_qk_reduction, sm_scale, logits_soft_cap, rope_scale, rope_theta
            As there.
        window_left : int
            -1, unless there is one level.
        q_data_type, kv_data_type, o_data_type : str or torch.dtype
            As there. The output has `q_data_type` by default; with 8-bit queries it must be given.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, naming it.
        """
        named = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for wrapper in self._wrappers:
            wrapper._problem = None  # whatever becomes of this plan
        causal = check_flag("causal", causal)
        num_levels = len(self._wrappers)
        levels = list(zip(*_per_level(num_levels, named), strict=True))
        if num_levels > 1 and (pos_encoding_mode != "NONE" or window_left != -1):
            name = "window_left" if pos_encoding_mode == "NONE" else "pos_encoding_mode"
            given = window_left if name == "window_left" else pos_encoding_mode
            raise ValueError(
                f"`{name}` must be {'-1' if name == 'window_left' else 'NONE'} on several levels, "
                f"where keys have no positions in common, got {given!r}"
            )
        for i, (wrapper, tables) in enumerate(zip(self._wrappers, levels, strict=True)):
            qo_indptr, kv_indptr, kv_indices, last_page_len = tables
            wrapper.plan(
                qo_indptr,
                kv_indptr,
                kv_indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and i == num_levels - 1,
                pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                o_data_type=o_data_type,
            )
        tokens = [
            wrapper._problem.requests.num_qo_tokens
            for wrapper in self._wrappers
            if wrapper._problem
        ]
        if len(set(tokens)) > 1:
            for wrapper in self._wrappers:
                wrapper._problem = None
            raise ValueError(
                f"`qo_indptr_arr` must end in one number of tokens on all levels, got {tokens}"
            )

    begin_forward = plan

    @flashinfer_api(trace=cascade_run_trace)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the planned levels, for one layer.

        Parameters
        ----------
        q : torch.Tensor
            ``[tokens, num_qo_heads, head_dim]``, dtype as planned; last dimension contiguous, rows
            at multiples of 16 bytes.
        paged_kv_cache : torch.Tensor or tuple of torch.Tensor
            Keys and values of all levels, as for ``BatchPrefillWithPagedKVCacheWrapper.run``.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            As there.

        Returns
        -------
        torch.Tensor
            ``[tokens, num_qo_heads, head_dim]``, dtype as planned; 0 for a query without keys.

        Raises
        ------
        TypeError, ValueError
            If nothing is planned, or a tensor is not as planned.
        """
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        if len(self._wrappers) == 1:
            return self._wrappers[0].run(q, paged_kv_cache, **scales)
        check_tensor("q", q)
        shape = (len(self._wrappers), *q.shape)
        planned = self._planned_results
        dtype = q.dtype if planned is None else planned[1]  # not planned: the levels say so
        outs = torch.empty(shape, dtype=dtype, device=q.device)
        lses = torch.empty(shape[:-1], dtype=torch.float32, device=q.device)
        for wrapper, out, lse in zip(self._wrappers, outs, lses, strict=True):
            wrapper.run(q, paged_kv_cache, out=out, lse=lse, **scales)
        return merge_states(outs.transpose(0, 1), lses.transpose(0, 1))[0]

    forward = run

    def end_forward(self) -> None:
        """Deprecated: nothing ends with a step; here for callers that pair it."""


def _per_level(num_levels: int, lists: dict[str, Any]) -> list[Sequence[torch.Tensor]]:
    """Lists of one tensor for each level."""
    for name, tensors in lists.items():
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(
                f"`{name}` must be a list of one torch.Tensor per level, got "
                f"{type(tensors).__name__}"
            )
        if len(tensors) != num_levels:
            raise ValueError(
                f"`{name}` must have one torch.Tensor for each of {num_levels} levels, got "
                f"{len(tensors)}"
            )
    return list(lists.values())
