"""Causal prefill with ranges that are seen in both directions:
``flashinfer.attention.BatchPrefillWithCausalBidirectionalRangesWrapper``.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..._common.cache_layout import split_cache
from ..._common.checks import count as check_count
from ..._common.checks import tensor as check_tensor
from ..._instrument.decorator import flashinfer_api, flashinfer_constructor
from ...jit.attention.config import PACKED_FLOAT4
from ...jit.attention.ranges import ranges_jit_args
from ...trace.templates.attention_ranges import bidirectional_ranges_run_trace
from ..checks import refuse, resolve_dtype, resolve_dtypes
from .base import Cache, Result
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from .plan_arguments import takes_arguments_of

_OWN_MASK = "causality and the ranges of run() are the mask"


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    r"""Causal attention over a paged cache; queries also see a range of keys in both directions.

    For prompts with images, whose tokens see each other while text sees what comes before: a query
    at position P of its request, with the range [s, e], sees key j if

    .. math:: 0 \le P - j \le w_c \quad\text{or}\quad s \le j \le e,\ P - j \le w_r

    with the windows of ``run``; without a window there is no limit to the left. Positions count
    from the first key of the request, whose last keys are those of the queries: a prompt in parts
    gives the result of the whole one if no range ends after the keys that are there.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, \
paged_kv_indices_buf, paged_kv_last_page_len_buf
        As for :class:`BatchPrefillWithPagedKVCacheWrapper`.
    pos_encoding_mode : str
        ``"NONE"`` or ``"ROPE_LLAMA"``.
    q_data_type, kv_data_type, o_data_type : torch.dtype
        As for `plan` of that class; every `plan` has these. Keys and values have no 4 bits.
    head_dim_qk, head_dim_vo : int
        Head sizes of every `plan`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    Gemma Team, "Gemma 3 Technical Report", 2025. The mask is a variant of the attention kernels
    (docs/variants.md), evaluated from 8 bytes a query. A plan does not know the ranges: products
    with keys that no query of a tile sees are computed, and left out of the result.

    Examples
    --------
    >>> workspace = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
    >>> wrapper = flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper(workspace)
    >>> qo_indptr = torch.tensor([0, 20], dtype=torch.int32)
    >>> kv_indptr, last = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([4]).int()
    >>> pages = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
    >>> wrapper.plan(qo_indptr, kv_indptr, pages, last, 8, 2, 128, 16)
    >>> ranges = torch.full((20, 2), -1, dtype=torch.int32, device="cuda")
    >>> ranges[5:13] = torch.tensor([5, 12])  # an image of 8 tokens
    >>> q = torch.randn(20, 8, 128, dtype=torch.bfloat16, device="cuda")
    >>> cache = torch.randn(2, 2, 16, 2, 128, dtype=torch.bfloat16, device="cuda")
    >>> wrapper.run(q, cache, ranges).shape
    torch.Size([20, 8, 128])
    """

    @flashinfer_constructor
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        o_data_type: torch.dtype | None = None,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
    ) -> None:
        if pos_encoding_mode not in ("NONE", "ROPE_LLAMA"):
            raise ValueError(
                f"`pos_encoding_mode` must be 'NONE' or 'ROPE_LLAMA', got {pos_encoding_mode!r}"
            )
        dtypes = resolve_dtypes(q_data_type, kv_data_type, o_data_type)
        if dtypes[1] is PACKED_FLOAT4:
            raise ValueError("`kv_data_type` must not be uint8 (4 bits): there is no such kernel")
        head_dims = check_count("head_dim_qk", head_dim_qk), check_count("head_dim_vo", head_dim_vo)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            jit_args=ranges_jit_args(*dtypes, *head_dims),
            jit_kwargs={"pos_encoding_mode": int(pos_encoding_mode == "ROPE_LLAMA")},
            variant_owns_mask=True,
        )
        names = ("q_data_type", "kv_data_type", "o_data_type")
        self._made_for: dict[str, Any] = dict(zip(names, dtypes, strict=True))
        self._made_for |= {"head_dim_qk": head_dims[0], "head_dim_vo": head_dims[1]}
        self._first_rows = self._qo_indptr_buf

    @flashinfer_api
    def plan(  # type: ignore[override]
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str | None = None,
        kv_data_type: torch.dtype | str | None = None,
        o_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        r"""Divide the work of a batch over the GPU; the ranges are arguments of ``run``.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, \
num_kv_heads, page_size, use_fp16_qk_reduction, sm_scale, non_blocking, max_token_per_sequence, \
max_sequence_kv, fixed_split_size, disable_split_kv
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`.
        head_dim_qk, head_dim_vo, q_data_type, kv_data_type, o_data_type
            As the wrapper was made, or None.
        pos_encoding_mode : str
            ``"NONE"`` takes that of the wrapper; or ``"ROPE_LLAMA"``.
        causal, custom_mask, packed_custom_mask, window_left, logits_soft_cap, prefix_len_ptr, \
token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
            Must be left out: causality, the ranges and the windows of ``run`` are the mask.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, or as that method says.
        """
        self._problem = None
        made = self._checked_plan(locals())
        super().plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            page_size=page_size,
            pos_encoding_mode=pos_encoding_mode,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            sm_scale=sm_scale,
            non_blocking=non_blocking,
            max_token_per_sequence=max_token_per_sequence,
            max_sequence_kv=max_sequence_kv,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            **made,
        )
        if self._qo_indptr_buf is None:
            rows = qo_indptr.to(torch.int32)
            self._first_rows = rows.to(self.device, non_blocking=non_blocking)

    begin_forward = plan  # type: ignore[assignment]

    @takes_arguments_of(plan, without="non_blocking")
    def workspace_size(self, arguments: Mapping[str, Any]) -> tuple[int, int]:
        """Bytes of workspace that ``plan`` with these arguments needs, exactly.

        Returns
        -------
        tuple of int
            Bytes of the float workspace and of the int workspace.
        """
        return super().workspace_size(**{**arguments, **self._checked_plan(arguments)})

    def _checked_plan(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """What the wrapper was made for, if the arguments of a plan do not contradict it."""
        window_left = plan["window_left"]
        refuse(
            _OWN_MASK,
            causal=plan["causal"],
            custom_mask=plan["custom_mask"],
            packed_custom_mask=plan["packed_custom_mask"],
            window_left=None if window_left == -1 else window_left,
            prefix_len_ptr=plan["prefix_len_ptr"],
            token_pos_in_items_ptr=plan["token_pos_in_items_ptr"],
            token_pos_in_items_len=plan["token_pos_in_items_len"] or None,
            max_item_len_ptr=plan["max_item_len_ptr"],
        )
        refuse("there is no kernel for it", logits_soft_cap=plan["logits_soft_cap"] or None)
        for name, made in self._made_for.items():
            planned = plan[name]
            if name.endswith("data_type") and planned is not None:
                planned = resolve_dtype(name, planned)
            if planned is not None and planned != made:
                raise ValueError(f"`{name}` must be {made} as the wrapper was made, got {planned}")
        return self._made_for

    @flashinfer_api(trace=bidirectional_ranges_run_trace)
    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Result:
        """Attention of the planned batch for one layer.

        Parameters
        ----------
        q, paged_kv_cache
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.
        bidirectional_ranges : torch.Tensor
            ``[rows of q, 2]`` int32, contiguous, on the device of `q`: the first and the last key
            of each query's range, both included, by their positions in the request; (-1, -1), or
            any whose last is before its first, for none. Keys that do not exist are not seen,
            ranges of queries may overlap, and a query need not be within its own. A CUDA graph
            reads them at each replay.
        causal_window_left : int
            How many keys before its own position a query sees outside its range; -1: all.
        range_window_left : int
            The same within its range. Keys after its position are seen in any case.
        q_scale, k_scale, v_scale : float, optional
            Scales of quantised tensors: the first two multiply the logits, the last the output.
        out, lse, return_lse, enable_pdl
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.
        kv_cache_sf : None
            There is no kernel for 4-bit caches.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            Output and, with `return_lse`, log-sum-exps (base 2).

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described.
        """
        refuse("there is no kernel for it", kv_cache_sf=kv_cache_sf)
        check_tensor("q", q, 3)
        check_tensor("bidirectional_ranges", bidirectional_ranges, 2)
        if bidirectional_ranges.shape != (q.shape[0], 2):
            raise ValueError(
                f"`bidirectional_ranges` must have shape {[q.shape[0], 2]}, got "
                f"{list(bidirectional_ranges.shape)}"
            )
        windows = (
            check_count("causal_window_left", causal_window_left, -1),
            check_count("range_window_left", range_window_left, -1),
        )
        k, v = split_cache(paged_kv_cache)
        result: Result = self._launch(
            q,
            k,
            v,
            (bidirectional_ranges, self._first_rows, *windows),
            out=out,
            lse=lse,
            return_lse=return_lse,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            enable_pdl=enable_pdl,
        )
        return result

    def run_return_lse(  # type: ignore[override]
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        *,
        return_lse: bool = True,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Result:
        """``run`` with ``return_lse=True``."""
        return self.run(
            q,
            paged_kv_cache,
            bidirectional_ranges,
            causal_window_left,
            range_window_left,
            q_scale,
            k_scale,
            v_scale,
            out,
            lse,
            return_lse,
            enable_pdl,
            kv_cache_sf,
        )

    def forward(  # type: ignore[override]
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Result:
        """Deprecated: ``run``."""
        options = (causal_window_left, range_window_left, q_scale, k_scale, v_scale)
        return self.run(
            q,
            paged_kv_cache,
            bidirectional_ranges,
            *options,
            enable_pdl=enable_pdl,
            kv_cache_sf=kv_cache_sf,
        )

    def forward_return_lse(  # type: ignore[override]
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1,
        range_window_left: int = -1,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Result:
        """Deprecated: ``run`` with ``return_lse=True``."""
        options = (causal_window_left, range_window_left, q_scale, k_scale, v_scale)
        return self.run(
            q,
            paged_kv_cache,
            bidirectional_ranges,
            *options,
            return_lse=True,
            enable_pdl=enable_pdl,
            kv_cache_sf=kv_cache_sf,
        )
