"""Lengths of sequences whose parts the ranks hold."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist


def _clear(config: Any) -> None:
    for field in fields(config):
        setattr(config, field.name, None)


@dataclass
class UnevenCPConfig:
    """One sequence whose length the ranks do not divide; padding stands at its end.

    Attributes
    ----------
    seq_len : int, optional
        Tokens of the sequence. None: it has no padding.
    seq_len_padded : int, optional
        Tokens with padding, of all ranks.
    seq_len_cur_ring_group : torch.Tensor, optional
        ``[ring_size]``, integers: tokens without padding that each rank of the ring has after the
        exchange of heads, from `uneven_cp_config`. None without a ring.
    """

    seq_len: int | None = None
    seq_len_padded: int | None = None
    seq_len_cur_ring_group: torch.Tensor | None = None

    def reset(self) -> None:
        """Set all attributes to None."""
        _clear(self)


@dataclass
class VarlenCPConfig:
    """Several sequences in one tensor, one after another.

    Attributes
    ----------
    cu_seqlens_q_cur_ulysses_group, cu_seqlens_kv_cur_ulysses_group : torch.Tensor, optional
        ``[sequences + 1]``, int32: where each sequence begins among the tokens of all ranks, from
        `ulysses_varlen_config`. What lies after the last one is padding.
    cu_seqlens_q_cur_ring_group, cu_seqlens_kv_cur_ring_group : torch.Tensor, optional
        ``[ring_size, sequences + 1]``, int32: where each rank's part of a sequence begins among the
        tokens of that rank, from `ring_varlen_config`.
    max_seq_len_q_cur_ulysses_group, max_seq_len_kv_cur_ulysses_group : int, optional
        Tokens of the longest sequence; the offsets have them, so they change nothing.
    max_seq_len_q_cur_ring_group, max_seq_len_kv_cur_ring_group : int, optional
        The same for a rank's parts.
    """

    cu_seqlens_q_cur_ulysses_group: torch.Tensor | None = None
    cu_seqlens_kv_cur_ulysses_group: torch.Tensor | None = None
    max_seq_len_q_cur_ulysses_group: int | None = None
    max_seq_len_kv_cur_ulysses_group: int | None = None
    cu_seqlens_q_cur_ring_group: torch.Tensor | None = None
    cu_seqlens_kv_cur_ring_group: torch.Tensor | None = None
    max_seq_len_q_cur_ring_group: int | None = None
    max_seq_len_kv_cur_ring_group: int | None = None

    def set_varlen_cp_config(
        self,
        cu_seqlens_q_all_ranks: torch.Tensor,
        cu_seqlens_kv_all_ranks: torch.Tensor,
        max_seq_len_q: int,
        max_seq_len_kv: int,
        ulysses_group: dist.ProcessGroup | None,
        ring_group: dist.ProcessGroup | None,
    ) -> None:
        """Take the result of `ring_varlen_config` or `ulysses_varlen_config`.

        Parameters
        ----------
        cu_seqlens_q_all_ranks, cu_seqlens_kv_all_ranks, max_seq_len_q, max_seq_len_kv
            The function's result. It describes the ring if `ring_group` has several ranks.
        ulysses_group, ring_group : torch.distributed.ProcessGroup, optional
            As for `ParallelAttention`.
        """
        self.reset()
        of_ring = ring_group is not None and dist.get_world_size(ring_group) > 1
        group = "ring" if of_ring else "ulysses"
        setattr(self, f"cu_seqlens_q_cur_{group}_group", cu_seqlens_q_all_ranks)
        setattr(self, f"cu_seqlens_kv_cur_{group}_group", cu_seqlens_kv_all_ranks)
        setattr(self, f"max_seq_len_q_cur_{group}_group", max_seq_len_q)
        setattr(self, f"max_seq_len_kv_cur_{group}_group", max_seq_len_kv)

    def reset(self) -> None:
        """Set all attributes to None."""
        _clear(self)
