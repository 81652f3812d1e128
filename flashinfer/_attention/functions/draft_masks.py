"""Masks of drafts: which of a request's own query tokens each of them sees."""

from __future__ import annotations

from typing import Any

import torch

from ..._common.checks import tensor as check_tensor
from ..._common.dtypes import torch_name

_WORD = 32  # queries by bits of a word


def draft_words(mask: Any, rows: int, tokens: tuple[str, int]) -> torch.Tensor:
    """A checked mask of drafts as words.

    Parameters
    ----------
    mask : torch.Tensor
        ``[batch_size, tokens, 2 * words]`` or ``[rows, 2 * words]`` uint16, of which two make a
        word: bit ``j % 32`` of word ``j // 32`` says whether a query sees the request's query
        ``j``. There may be more rows than queries, as in a buffer of the largest batch.
    rows : int
        Query tokens of all requests.
    tokens : tuple
        Name and value of the most query tokens of a request.

    Returns
    -------
    torch.Tensor
        ``[rows, words]`` int32, contiguous.

    Raises
    ------
    TypeError, ValueError
        If `mask` is not as described, or requests have one query token.
    """
    name, most = tokens
    check_tensor("mask", mask)
    if most == 1:
        raise ValueError(f"`mask` must be left out with `{name}` 1: a query alone sees all keys")
    width = -(-most // _WORD) * 2
    shape = mask.shape
    is_rows = mask.ndim == 2 or (mask.ndim == 3 and shape[1] == most)
    if mask.dtype != torch.uint16 or not is_rows or shape[-1] != width:
        raise ValueError(
            f"`mask` must be uint16 [batch_size, {most}, {width}] or [rows of `query`, {width}] "
            f"with `{name}` {most}, got {torch_name(mask.dtype)} {list(shape)}"
        )
    if shape.numel() < rows * width:
        raise ValueError(
            f"`mask` must have a row for each of {rows} query tokens, got shape {list(shape)}"
        )
    halves = mask.reshape(-1, width)[:rows].contiguous()
    if halves.data_ptr() % 4:
        halves = halves.clone()
    return halves.view(torch.int32)


def as_custom_mask(
    words: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """A bool for each query and key: those of the queries' own as the words say, and all others.

    Parameters
    ----------
    words : torch.Tensor
        As `draft_words` makes them.
    starts, lengths : torch.Tensor
        First rows of the requests' queries, and their lengths in keys, on the host.

    Raises
    ------
    ValueError
        While a CUDA graph is captured, if the words are on the GPU.
    """
    if words.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "`mask` must be on the host while a CUDA graph is captured and lengths are there: the "
            "plan reads it"
        )
    bits = (words.cpu()[:, :, None] >> torch.arange(_WORD)) & 1
    own = bits.bool().flatten(1)
    parts = [torch.ones(0, dtype=torch.bool)]
    begins = starts.tolist()
    for begin, end, keys in zip(begins, begins[1:], lengths.tolist(), strict=False):
        queries = end - begin
        seen = torch.ones(queries, max(keys, queries), dtype=torch.bool)
        seen[:, seen.shape[1] - queries :] = own[begin:end, :queries]
        parts.append(seen[:, seen.shape[1] - keys :].flatten())
    return torch.cat(parts)
