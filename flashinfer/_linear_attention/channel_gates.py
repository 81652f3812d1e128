"""The delta rule whose learning rate has a part for each key channel, by the kernel for one number.

With the erase gate b by key channel and the write gate w by value channel,

    S = S diag(a);  S = S + (w v - S (b k)) k^T;  out = scale S q

is the delta rule with rate 1 for the scaled state T = S diag(r), r = sqrt(b) of the same token:

    T = T diag(a r / r');  T = T + (w v - T (r k)) (r k)^T;  out = scale T (q / r)

where r' is that of the token before, and 1 at the start. Each column of T is one of S times a
number, so no digit of S is lost.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_LOWEST_RATE = {torch.float16: 2.0**-20, torch.bfloat16: 2.0**-60}
"""What an erase gate of 0 counts as, so that q / r is finite in the type of q."""


class ScaledOperands(NamedTuple):
    """Operands of the delta rule with rate 1, ``[tokens, heads, dim]``, and what undoes the scale.

    Attributes
    ----------
    log_decay : torch.Tensor
        float32 ``[tokens, heads, head_dim_k]``.
    undo : torch.Tensor
        float32 ``[sequences, heads, 1, head_dim_k]``: factors of the last states' columns.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    undo: torch.Tensor


def scale_by_channel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    w: torch.Tensor | None,
    bounds: torch.Tensor,
    heads: int,
    normalize: bool,
) -> ScaledOperands:
    """Operands for `heads` state heads; `bounds` are the beginnings of packed sequences."""
    dtype = q.dtype
    bounds = bounds.long().clamp(0, len(q))  # as the kernels cut them
    q, k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k, v))
    if normalize:
        q, k = (_unit(x.float()) for x in (q, k))
    log_decay = torch.zeros(k.shape, device=k.device) if g is None else g.float()
    undo = torch.ones((len(bounds) - 1, heads, 1, k.shape[2]), device=k.device)
    if w is not None:
        v = v.float() * w.float()
    if beta is not None:
        half = beta.float().clamp(min=_LOWEST_RATE[dtype]).log() / 2
        before = torch.nn.functional.pad(half, (0, 0, 0, 0, 1, 0))[:-1]
        is_first = torch.zeros(len(q) + 1, dtype=torch.bool, device=k.device)
        is_first = is_first.index_fill(0, bounds[:-1], True)[:-1]
        log_decay = log_decay + half - before.masked_fill(is_first[:, None, None], 0.0)
        root = half.exp()
        q, k = q.float() / root, k.float() * root
        if len(half):
            last = (bounds[1:] - 1).clamp(min=0)
            none = (bounds.diff() <= 0)[:, None, None]
            undo = torch.exp(-half[last].masked_fill(none, 0.0))[:, :, None]
    return ScaledOperands(q.to(dtype), k.to(dtype), v.to(dtype), log_decay, undo)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
