"""Causal convolution of each column over the tokens of each request."""

from __future__ import annotations

import torch

from ..batch import Batch


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    batch: Batch,
) -> torch.Tensor:
    """SiLU of the sums over a token and the ones before it.

    No package has an operation for it. All requests lie in one tensor, each after the tokens that
    its state has kept, so that a sum is one of shifted rows; shapes do not depend on lengths.

    Parameters
    ----------
    x : torch.Tensor
        ``[nnz, columns]``.
    weight : torch.Tensor
        ``[columns, width]``, the last element for the token itself.
    bias : torch.Tensor or None
        ``[columns]``.
    state : torch.Tensor
        ``[slots, width - 1, columns]``: the last tokens of each request, overwritten.
    batch : Batch
        Whose tokens these are.
    """
    kept, requests = weight.shape[1] - 1, len(batch.slots)
    step = torch.arange(kept, device=x.device)
    number = torch.arange(requests, device=x.device)
    slots = batch.slots.long()  # -1, of padding, is the last slot
    # Tokens of no request come after all others.
    owner = torch.where(batch.batch_indices < 0, requests, batch.batch_indices).long()
    row = torch.arange(len(x), device=x.device) + kept * (owner + 1)
    first = batch.qo_indptr[:-1].long() + kept * number
    padded = x.new_zeros(len(x) + kept * (requests + 1), x.shape[1])
    padded[row] = x
    padded[first[:, None] + step] = state[slots].to(x.dtype)
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for tap in range(kept + 1):
        total += padded[row - kept + tap].float() * weight[:, tap].float()
    if bias is not None:
        total += bias.float()
    end = batch.qo_indptr[1:].long() + kept * number
    state[slots] = padded[end[:, None] + step].to(state.dtype)
    return torch.nn.functional.silu(total).to(x.dtype)
