"""The deprecated wrappers of attention over a shared prefix: two levels with merged results."""

from __future__ import annotations

from typing import Any

import torch

from ..._common.checks import count as check_count
from ..._common.checks import tensor as check_tensor
from ..checks import check_backend
from ..functions.merge import merge_state_in_place
from ..functions.single import single_prefill_with_kv_cache_return_lse
from ..index_tensors import host_indices
from .base import Cache
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .paged import PagedWrapper
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Decode attention over a prefix that all requests share, and pages of their own.

    Deprecated: :class:`flashinfer.MultiLevelCascadeAttentionWrapper` has any number of levels.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        For partial results of requests that are split; contiguous, any dtype.
    kv_layout : str
        ``"NHD"`` or ``"HND"``, of the prefix and of the cache.
    backend : str
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``, for the prefix; see docs/attention.md. The
        pages of a request, which one query sees, are always ``"fa2"``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    Source as for :class:`flashinfer.MultiLevelCascadeAttentionWrapper`.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        backend: str = "auto",
    ) -> None:
        check_backend(backend)
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout
        self._backend = backend

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Use other workspaces, from the next ``begin_forward`` on; contiguous tensors."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype | None = "float16",
        q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Describe the batch: the first arguments of ``BatchDecodeWithPagedKVCacheWrapper.plan``.

        Parameters
        ----------
        unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len : torch.Tensor
            Page table of the tokens after the prefix; a request may have none.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            As there.
        data_type : str or torch.dtype
            Element type of queries and keys: float16 or bfloat16.
        q_data_type, kv_data_type, o_data_type : str or torch.dtype, optional
            As there, the first two in place of `data_type`.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described.
        """
        dtypes: dict[str, Any] = {"data_type": data_type}
        if q_data_type is not None or kv_data_type is not None:
            dtypes = {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        self._unique.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            o_data_type=o_data_type,
            **dtypes,
        )

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Cache,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one query per request.

        Parameters
        ----------
        q : torch.Tensor
            ``[batch_size, num_qo_heads, head_dim]``.
        k_shared, v_shared : torch.Tensor
            The prefix, ``[length, num_kv_heads, head_dim]`` (``"NHD"``) or ``[num_kv_heads, length,
            head_dim]`` (``"HND"``).
        unique_kv_cache : torch.Tensor or tuple of torch.Tensor
            As for ``BatchDecodeWithPagedKVCacheWrapper.run``.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            As there, of the prefix and of the pages.

        Returns
        -------
        torch.Tensor
            ``[batch_size, num_qo_heads, head_dim]``, dtype as planned.

        Raises
        ------
        TypeError, ValueError
            If nothing is planned, or a tensor is not as planned.
        """
        scales = (q_scale, k_scale, v_scale)
        out, lse = _run_unique(self._unique, q, unique_kv_cache, scales)
        shared = single_prefill_with_kv_cache_return_lse(
            q,
            k_shared,
            v_shared,
            *scales,
            o_dtype=out.dtype,
            kv_layout=self._kv_layout,
            backend=self._backend,
        )
        merge_state_in_place(out, lse, *shared)
        return out

    def end_forward(self) -> None:
        """Deprecated: nothing ends with a step; here for callers that pair it."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(PagedWrapper):
    """Prefill attention over a prefix that all requests share, and pages of their own.

    Deprecated: :class:`flashinfer.MultiLevelCascadeAttentionWrapper` has any number of levels.

    Parameters
    ----------
    float_workspace_buffer, kv_layout
        As for :class:`BatchDecodeWithSharedPrefixPagedKVCacheWrapper`.
    backend : str
        ``"auto"``, ``"fa2"`` or, on Hopper, ``"fa3"``, for the prefix and for the pages.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    Source as for :class:`flashinfer.MultiLevelCascadeAttentionWrapper`.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        backend: str = "auto",
    ) -> None:
        self._unique = BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, backend=backend
        )
        self._kv_layout = kv_layout
        self._backend = backend
        self._table: tuple[Any, ...] | None = None
        self._planned_options: tuple[Any, ...] | None = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Use other workspaces, from the next ``forward`` on; contiguous tensors."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._planned_options = None

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Describe the batch: the first arguments of ``BatchPrefillWithPagedKVCacheWrapper.plan``.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : torch.Tensor
            Query tokens and page table of what follows the prefix. Kept until the first `forward`,
            which plans; those on the GPU are fetched by one copy.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
            As there.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described.
        """
        self._table = self._planned_options = None  # whatever becomes of this plan
        names = {
            "qo_indptr": qo_indptr,
            "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        host_qo_indptr, host_indptr, last = host_indices(names)
        sizes = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
        }
        heads = [check_count(name, size) for name, size in sizes.items()]
        self._table = (host_qo_indptr, host_indptr, paged_kv_indices, last, *heads)

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Cache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        o_data_type: str | torch.dtype | None = None,
    ) -> torch.Tensor:
        """Attention of the batch.

        Parameters
        ----------
        q : torch.Tensor
            ``[tokens, num_qo_heads, head_dim]``, float16, bfloat16 or of 8 bits.
        k_shared, v_shared, unique_kv_cache : torch.Tensor
            As for :meth:`BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward`.
        causal : bool
            Whether query i of n sees its request's own keys up to ``i + kv_len - n`` only. The
            prefix is seen by all.
        use_fp16_qk_reduction : bool
            False: logits are summed in float32.
        sm_scale : float, optional
            Factor of the logits; ``1 / sqrt(head_dim)`` by default. A change of it, of `causal` or
            of a dtype plans anew.
        rope_scale, rope_theta : float, optional
            Without effect, as there are no rotary embeddings.
        q_scale, k_scale, v_scale : float or torch.Tensor, optional
            As for :meth:`BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward`.
        o_data_type : str or torch.dtype, optional
            float16 or bfloat16, by default that of `q`; needed with 8-bit queries.

        Returns
        -------
        torch.Tensor
            ``[tokens, num_qo_heads, head_dim]`` of `o_data_type`.

        Raises
        ------
        TypeError, ValueError
            If nothing is planned, or an argument is not as described.
        """
        if self._table is None:
            raise ValueError("begin_forward() must be called before forward()")
        for name, tensor in (("q", q), ("k_shared", k_shared)):
            check_tensor(name, tensor)
        options: dict[str, Any] = {
            "causal": causal,
            "use_fp16_qk_reduction": use_fp16_qk_reduction,
            "sm_scale": sm_scale,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
            "q_data_type": q.dtype,
            "kv_data_type": k_shared.dtype,
            "o_data_type": o_data_type,
        }
        if self._planned_options != (options_now := tuple(options.values())):
            self._planned_options = None
            self._unique.plan(*self._table, **options)
            self._planned_options = options_now
        scales = (q_scale, k_scale, v_scale)
        out, lse = _run_unique(self._unique, q, unique_kv_cache, scales)
        shared = single_prefill_with_kv_cache_return_lse(
            q,
            k_shared,
            v_shared,
            *scales,
            o_dtype=out.dtype,
            kv_layout=self._kv_layout,
            sm_scale=sm_scale,
            backend=self._backend,
        )
        merge_state_in_place(out, lse, *shared)
        return out

    def end_forward(self) -> None:
        """Deprecated: nothing ends with a step; here for callers that pair it."""


def _run_unique(
    wrapper: Any, q: torch.Tensor, cache: Cache, scales: tuple[Any, Any, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the pages, and its log-sum-exps."""
    named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    out, lse = wrapper.run(q, cache, return_lse=True, **named)
    return out, lse
