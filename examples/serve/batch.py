"""The tensors that the layers of one step share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Batch:
    """Tensors that the layers of one step share, all on the device.

    Attributes
    ----------
    tokens : torch.Tensor
        ``[nnz]`` int32: the new tokens of all requests, one request after the other.
    batch_indices, positions : torch.Tensor
        ``[nnz]`` int32: request of each token (-1: padding) and its position in that request.
    rotations : torch.Tensor
        ``[nnz]`` int32: row of each token in the cosines and sines; `positions` itself for models
        that have no other frequencies for long texts.
    qo_indptr : torch.Tensor
        ``[requests + 1]`` int32: first token of each request.
    kv_indices, kv_indptr, kv_last_page_len : torch.Tensor
        Page table, int32, as in `flashinfer.append_paged_kv_cache`.
    slots : torch.Tensor
        ``[requests]`` int32: where each request's states are; -1: padding, for which the last slot
        is left.
    attention : dict
        A planned wrapper for each `spec` of the model's layers.
    attended : int
        Rows that attention computes; rows beyond are padding.
    decodes : bool
        Whether every request has one new token.
    prompts : list of (int, int, int)
        Of each request with more than one: its first row, the end, its slot.
    singles : torch.Tensor
        ``[requests with one]`` int64: their numbers.
    tile : int or None
        Rows of a tile: see `in_tiles`.
    """

    tokens: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor
    rotations: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    kv_last_page_len: torch.Tensor
    slots: torch.Tensor
    attention: dict[Any, Any]
    attended: int
    decodes: bool
    prompts: list[tuple[int, int, int]]
    singles: torch.Tensor
    tile: int | None = None
