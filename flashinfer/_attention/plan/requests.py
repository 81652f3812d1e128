"""One batch of attention as a plan describes it: what kernels, references and traces read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...jit.attention.plan import DECODE, RAGGED, Group
from ...jit.attention.variant import AttentionVariant


@dataclass(slots=True)
class AttentionProblem:
    """Requests that attend to their own keys, and the options of the attention.

    Request ``b`` has the query tokens ``qo_indptr[b]`` to ``qo_indptr[b + 1]`` and, paged, the
    pages ``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``; ragged, the rows ``kv_indptr[b]`` to
    ``kv_indptr[b + 1]`` of k and v.

    Attributes
    ----------
    qo_indptr : torch.Tensor or None
        ``[batch_size + 1]`` int32 on the CPU. None: each request has `tokens_per_request` tokens.
    kv_indptr : torch.Tensor
        ``[batch_size + 1]`` int32 on the CPU.
    kv_len, last_page_len : torch.Tensor or None
        ``[batch_size]`` int32 on the CPU, either of them for pages; see `kv_lengths`.
    kv_indices : torch.Tensor or None
        Page numbers, int32, on the device of the wrapper; None for ragged.
    page_size : int
        Tokens of a page; 0 for ragged.
    rows_as_pages : bool
        The only request's keys are rows of k and v, which the kernel reads as pages that follow
        each other: the first set of a launch of two sets of tensors.
    causal : bool
        Aligned to the end: query i sees keys up to ``i + kv_len - qo_len``.
    custom_mask, mask_indptr : torch.Tensor or None
        Packed little-endian bits of ``qo_len x kv_len`` per request, uint8, and the first byte of
        each request, int32; on the device. Takes the place of `causal`.
    window_left : int
        Keys further than this before the query are masked; negative: none are.
    logits_soft_cap : float
        0: none.
    sm_scale : float
        Logits are ``q.k * sm_scale``.
    pos_encoding_mode : str
        ``"NONE"``, ``"ROPE_LLAMA"`` or ``"ALIBI"``.
    alibi_slopes : torch.Tensor or None
        ``[num_qo_heads]`` float32 on the device, with ``"ALIBI"``.
    prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        Multi-item scoring, on the device; see ``BatchPrefillWithPagedKVCacheWrapper.plan``.
    variant : AttentionVariant or None
        The user's variant.
    names : int
        What errors of the planner call the index tensors.
    backend : str
        That the caller wants: ``"auto"``, ``"fa2"`` or ``"fa3"``.
    """

    kv_indptr: torch.Tensor
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    o_data_type: torch.dtype
    sm_scale: float
    qo_indptr: torch.Tensor | None = None
    tokens_per_request: int = 1
    kv_len: torch.Tensor | None = None
    last_page_len: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    page_size: int = 0
    rows_as_pages: bool = False
    kv_layout: str = "NHD"
    causal: bool = False
    custom_mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None
    window_left: int = -1
    logits_soft_cap: float = 0.0
    pos_encoding_mode: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    alibi_slopes: torch.Tensor | None = None
    prefix_len_ptr: torch.Tensor | None = None
    token_pos_in_items_ptr: torch.Tensor | None = None
    token_pos_in_items_len: int = 0
    max_item_len_ptr: torch.Tensor | None = None
    variant: AttentionVariant | None = None
    names: int = DECODE
    backend: str = "auto"

    @property
    def batch_size(self) -> int:
        return self.kv_indptr.shape[0] - 1

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def is_hnd(self) -> bool:
        return self.kv_layout == "HND"

    @property
    def mask_mode(self) -> str:
        """Mask of the kernel, as in ``AttentionConfig``."""
        if self.custom_mask is not None:
            return "custom"
        if self.prefix_len_ptr is not None:
            return "multi_item"
        return "causal" if self.causal else "none"

    @property
    def num_qo_tokens(self) -> int:
        if self.qo_indptr is None:
            return self.batch_size * self.tokens_per_request
        return int(self.qo_indptr[-1])

    def group(self) -> Group:
        """The requests as the planner takes them.

        A custom mask may show a query any key; multi-item scoring never one behind it.
        """
        free = self.custom_mask is not None
        causal = not free and (self.causal or self.prefix_len_ptr is not None)
        return (
            self.names,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_len,
            self.last_page_len,
            self.page_size,
            causal,
            self.window_left,
            self.tokens_per_request,
        )

    def qo_lengths(self) -> torch.Tensor:
        """Query tokens of each request, ``[batch_size]`` int32 on the CPU."""
        if self.qo_indptr is None:
            return torch.full((self.batch_size,), self.tokens_per_request, dtype=torch.int32)
        return self.qo_indptr.diff()

    def kv_lengths(self) -> torch.Tensor:
        """Key tokens of each request, ``[batch_size]`` int32 on the CPU."""
        if self.kv_len is not None:
            return self.kv_len
        pages = self.kv_indptr.diff()
        if self.names == RAGGED or self.last_page_len is None:
            return pages
        return torch.where(pages > 0, (pages - 1) * self.page_size + self.last_page_len, 0)
