"""Rows of a pool by slots that are on the device: read and written without waiting for it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._common.checks import count as check_count
from .._common.checks import tensor as check_tensor
from .checks import check_slots


def write_rows(
    pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, live: torch.Tensor
) -> None:
    """``pool[slots] = rows`` for the rows that are `live`, whose slots are distinct.

    A row whose slot the pool has not is not live.
    The others write what the first live row writes, to its place: so nothing has to be counted.
    Without a live row all of them write what is there.
    """
    if len(slots) == 0 or len(pool) == 0:
        return
    target = slots.long().clamp(0, len(pool) - 1)
    live = live & (target == slots)
    places = torch.arange(len(slots), device=slots.device)
    source = torch.where(live, places, live.int().argmax())
    target = target[source]
    mask = live[source].view(-1, *(1,) * (rows.ndim - 1))
    pool[target] = torch.where(mask, rows[source].to(pool.dtype), pool[target])


class Checkpoints(NamedTuple):
    """States on the way, kept after every `every` tokens of each sequence.

    Attributes
    ----------
    pool : torch.Tensor
        States, one a row.
    starts : torch.Tensor
        ``[sequences + 1]`` int64: the first checkpoint of each sequence.
    slots : torch.Tensor or None
        The row of each checkpoint, negative: it is not kept; None: checkpoint i has row i.
    """

    pool: torch.Tensor
    starts: torch.Tensor
    every: int
    slots: torch.Tensor | None = None

    def buffer(self) -> torch.Tensor:
        """Where a kernel writes checkpoint i to row i."""
        if self.slots is None:
            return self.pool
        return self.pool[self.slots.long().clamp(0, len(self.pool) - 1)]

    def keep(self, buffer: torch.Tensor) -> None:
        """Bring checkpoints of a buffer to their rows."""
        if self.slots is not None:
            write_rows(self.pool, self.slots, buffer, self.slots >= 0)


def read_checkpoints(
    pool: torch.Tensor | None,
    starts: torch.Tensor | None,
    every: int,
    slots: torch.Tensor | None = None,
    multiple_of: int = 1,
) -> Checkpoints | None:
    """The checkpoints that a call asks for."""
    given = pool is not None, starts is not None, every != 0
    if any(given) and not all(given):
        raise ValueError(
            "`state_checkpoints`, `checkpoint_cu_starts` and `checkpoint_every_n_tokens` must be "
            "given together"
        )
    check_count("checkpoint_every_n_tokens", every, 0)
    if every % multiple_of != 0:
        raise ValueError(
            f"`checkpoint_every_n_tokens` must be a multiple of {multiple_of}, got {every}"
        )
    if pool is None or starts is None:
        if slots is not None:
            raise ValueError("`checkpoint_state_indices` needs `state_checkpoints`")
        return None
    check_tensor("state_checkpoints", pool, 4)
    if slots is not None:
        check_slots("checkpoint_state_indices", slots, 1)
    return Checkpoints(pool, starts, every, slots)
