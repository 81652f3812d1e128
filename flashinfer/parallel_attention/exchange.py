"""Exchanges between ranks: heads for parts of the sequence, keys and values around a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .utils import group_size


def _all_to_all(
    pieces: Sequence[torch.Tensor], group: dist.ProcessGroup, *, together: bool
) -> list[torch.Tensor]:
    """Send ``piece[r]`` to rank r; what comes from rank r stands at r. `together`: one message."""
    if not together or len(pieces) == 1:
        received = [torch.empty_like(piece) for piece in pieces]
        for out, piece in zip(received, pieces, strict=True):
            dist.all_to_all_single(out, piece, group=group)
        return received
    flat = [piece.flatten(1) for piece in pieces]
    (all_of_them,) = _all_to_all([torch.cat(flat, 1)], group, together=True)
    parts = all_of_them.split([piece.shape[1] for piece in flat], 1)
    return [part.reshape(piece.shape) for part, piece in zip(parts, pieces, strict=True)]


def scatter_heads(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None, *, together: bool
) -> list[torch.Tensor]:
    """``[tokens, heads, dim]`` of each rank to ``[tokens of all, heads / ranks, dim]``."""
    ranks = group_size(group)
    if group is None or ranks == 1:
        return list(tensors)
    pieces = [
        tensor.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()  # [ranks, tokens, heads, dim]
        for tensor in tensors
    ]
    return [piece.flatten(0, 1) for piece in _all_to_all(pieces, group, together=together)]


def gather_heads(out: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """``[tokens of all, heads / ranks, dim]`` back to ``[tokens, heads, dim]``."""
    ranks = group_size(group)
    if group is None or ranks == 1:
        return out
    pieces = out.contiguous().unflatten(0, (ranks, -1))
    (received,) = _all_to_all([pieces], group, together=False)
    return received.transpose(0, 1).flatten(1, 2)


class Ring:
    """Keys and values on their way around a ring of ranks, in one message each step.

    Parameters
    ----------
    k, v : torch.Tensor
        This rank's, of the same shapes on all ranks.
    group : torch.distributed.ProcessGroup or None
        The ranks.

    Attributes
    ----------
    source : int
        The rank whose keys and values are here.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        self._group, self.size = group, group_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.source = self.rank
        self._shapes = k.shape, v.shape
        self._here = torch.cat([k.flatten(), v.flatten()]) if self.size > 1 else None
        self._coming = None if self._here is None else torch.empty_like(self._here)
        self._own = k, v
        self._works: list[dist.Work] = []

    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pair that is here."""
        if self._here is None:
            return self._own
        k, v = self._here.split([shape.numel() for shape in self._shapes])
        return k.view(self._shapes[0]), v.view(self._shapes[1])

    def send(self) -> None:
        """Begin to pass on what is here, while it may be read."""
        group = self._group
        assert group is not None and self._here is not None and self._coming is not None
        to, of = (dist.get_global_rank(group, (self.rank + step) % self.size) for step in (1, -1))
        # Every rank gives both at once, so that none waits for another to receive.
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._here, to, group),
                dist.P2POp(dist.irecv, self._coming, of, group),
            ]
        )

    def receive(self) -> None:
        """Wait for the previous rank's, which is then here."""
        for work in self._works:
            work.wait()
        self._here, self._coming = self._coming, self._here
        self.source = (self.source - 1) % self.size
