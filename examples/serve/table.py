"""Index arrays of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Settings:
    """The settings that all plans of an engine share.

    Attributes
    ----------
    workspace : torch.Tensor
        Memory of the wrappers, which run one after the other and may share it.
    page_size : int
        Tokens of a page.
    dtype, kv_dtype : torch.dtype
        Types of activations and of the cache.
    batch_invariant : bool
        Whether a token's result must not depend on what else is in the step.
    backend : str
        The one that attention for prompts takes; `ahead` names one whose kernel will be needed.
    """

    workspace: torch.Tensor
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    batch_invariant: bool = False
    backend: str = "auto"


@dataclass
class Table:
    """Index arrays of a step, int32: parts of one tensor, so that one copy moves all of them."""

    packed: torch.Tensor
    tokens: torch.Tensor
    rotations: torch.Tensor  # of each token; without switches of frequencies unused
    batch_indices: torch.Tensor  # of each token, where every request has one; -1: padding
    positions: torch.Tensor  # likewise; 0: padding
    qo_indptr: torch.Tensor
    lengths: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    slots: torch.Tensor
    kv_indices: torch.Tensor

    @staticmethod
    def divide(packed: torch.Tensor, requests: int, tokens: int) -> Table:
        """Parts for so many requests and tokens; what is left is for page numbers."""
        sizes = [tokens] * 4 + [requests + 1, requests, requests + 1, requests, requests]
        return Table(packed, *packed.split([*sizes, len(packed) - sum(sizes)]))

    @staticmethod
    def length(requests: int, tokens: int, pages: int) -> int:
        """Elements of the whole."""
        return 4 * tokens + 5 * requests + 2 + pages
