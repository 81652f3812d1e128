"""The two-sided names of the experts' all-to-all, over the kernels of `MoeAlltoAll`.

A token goes to a rank once, whatever number of its experts are there. Received tokens have fixed
places: token i that rank r sent here is in row ``r * max_token_count_per_rank + i``. Every function
is one exchange there and back: what it does not need in one direction is a few bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .._common import checks
from . import moe_a2a
from .expert_memory import ExpertMemory, expert_backend
from .mapping import Mapping
from .mnnvl import MnnvlConfig

__all__ = ["MnnvlMoe", "MoEAlltoallInfo"]

_MAX_TOKENS_AT_FIRST, _BYTES_AT_FIRST = 256, 4096  # memory grows with the calls


@dataclass
class MoEAlltoallInfo:
    """Where tokens of one batch go, for the exchanges that follow its preparation.

    The kernels find places from the experts' numbers, so the index tensors of FlashInfer's class
    are None.

    Attributes
    ----------
    local_token_allocation_count : int
        Rows of what a rank receives: ``ep_size * max_token_count_per_rank``.
    experts : torch.Tensor
        int32 ``[tokens, top_k]``: this rank's tokens' experts.
    slot_count : int
        Experts of all ranks.
    """

    local_gather_indices: torch.Tensor | None
    send_rank_count_cumsum: torch.Tensor | None
    send_rank_local_indices: torch.Tensor | None
    recv_rank_count_cumsum: torch.Tensor | None
    recv_rank_local_indices: torch.Tensor | None
    backward_recv_rank_local_indices: torch.Tensor | None
    local_token_allocation_count: int
    experts: torch.Tensor
    slot_count: int


class _Exchange:
    """Ranks and memory that a workspace tensor stands for."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.rank, self.ep_size = backend.Get_rank(), backend.Get_size()
        self.sizes = (_MAX_TOKENS_AT_FIRST, _BYTES_AT_FIRST, _BYTES_AT_FIRST, 0)
        self.memory: ExpertMemory | None = None
        self.metainfo = torch.empty(0)

    def reserve(self, max_tokens: int, sent: int, returned: int, stats: int = 0) -> None:
        """Make room for bytes of a token there and back. Collective where it must grow."""
        tokens, there, back, length = self.sizes
        most = max(tokens, max_tokens), max(there, sent), max(back, returned), stats or length
        if self.memory is not None and most == self.sizes:
            return
        if self.memory is not None and torch.cuda.is_current_stream_capturing():
            raise ValueError("`workspace` must grow: make the largest call before a capture")
        self.close()
        self.sizes = most
        size = moe_a2a.moe_a2a_get_workspace_size_per_rank(self.ep_size, *most)
        self.memory = ExpertMemory(size, self.backend)
        self.metainfo = moe_a2a.moe_a2a_initialize(
            self.memory.tensor, self.rank, self.ep_size, most[0], most[3]
        )

    def there_and_back(
        self,
        info: MoEAlltoallInfo,
        sent: list[torch.Tensor],
        returned: torch.Tensor | None = None,
        *,
        stats: torch.Tensor | None = None,
        marks_experts: bool = False,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
        """Send rows out and outputs back.

        Returns the rows that arrive, gathered statistics, and the sum of `returned`.

        With `marks_experts` the first tensor are experts, and rows without a token get the number
        `slot_count` of no expert.
        """
        max_tokens = info.local_token_allocation_count // self.ep_size
        back = returned
        if back is None:  # a dispatch ends with a combine: of as little as it can have
            back = info.experts.new_zeros(self.ep_size, max_tokens, 8, dtype=torch.bfloat16)
        self.reserve(
            max_tokens,
            sum(math.prod(t.shape[1:]) * t.element_size() for t in sent),
            back.shape[-1] * back.element_size(),
            0 if stats is None else stats.numel(),
        )
        assert self.memory is not None
        place = (self.memory.tensor, self.metainfo)
        top_k = info.experts.shape[1]
        received, offset, gathered = moe_a2a.moe_a2a_dispatch(
            info.experts, sent, *place, max_tokens, self.rank, self.ep_size, top_k,
            info.slot_count, eplb_local_stats=stats,
        )  # fmt: skip
        if marks_experts:
            moe_a2a.moe_a2a_sanitize_expert_ids(received[0], *place, self.rank, info.slot_count)
        arrived = [t.reshape(-1, *s.shape[1:]).clone() for t, s in zip(received, sent, strict=True)]
        gathered = None if gathered is None else gathered.clone()
        total = moe_a2a.moe_a2a_combine(
            back, len(info.experts), *place, max_tokens, self.rank, self.ep_size, top_k, offset
        )
        return arrived, gathered, total if returned is not None else None

    def close(self) -> None:
        """Free the memory. Collective."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None


# By the address of the workspace tensor, which stays alive with them.
_exchanges: dict[int, tuple[_Exchange, torch.Tensor]] = {}


def open_workspace(backend: Any) -> torch.Tensor:
    """A workspace of the ranks of `backend`, a tensor that stands for it."""
    tensor = torch.zeros(1, 1, dtype=torch.int64)
    _exchanges[tensor.data_ptr()] = (_Exchange(backend), tensor)
    return tensor


def close_workspace(workspace: torch.Tensor) -> None:
    """Free a workspace. Collective; a second call does nothing."""
    found = _exchanges.pop(workspace.data_ptr(), None)
    if found is not None:
        found[0].close()


def _opened(workspace: Any, ep_rank: int, ep_size: int) -> _Exchange:
    address = checks.tensor("workspace", workspace).data_ptr()
    if address not in _exchanges:
        raise ValueError("`workspace` must be of MnnvlMoe.get_moe_workspaces, and open")
    exchange = _exchanges[address][0]
    if (ep_rank, ep_size) != (exchange.rank, exchange.ep_size):
        raise ValueError(
            f"`ep_rank` and `ep_size` must be those of the workspace, {exchange.rank} and "
            f"{exchange.ep_size}, got {ep_rank} and {ep_size}"
        )
    return exchange


class MnnvlMoe:
    """Functions of the two-sided all-to-all. Memory is shared over CUDA IPC inside a host.

    Memory grows when a call needs more than all before, collectively: the largest call comes before
    a capture.
    """

    moe_workspace_tensor: ClassVar[torch.Tensor | None] = None
    moe_prepare_workspace_tensor: ClassVar[torch.Tensor | None] = None
    moe_mapping: ClassVar[Mapping | None] = None

    @classmethod
    def get_moe_workspaces(
        cls, mapping: Mapping, config: MnnvlConfig | None = None
    ) -> torch.Tensor:
        """The workspace of exchanges, made at the first call. Collective then.

        `mapping`: `moe_ep_size` ranks divide the experts, the same in every call. `config`: its
        `comm_backend` sets up the ranks; None: ``torch.distributed``.
        """
        cls._same_mapping(mapping)
        if cls.moe_workspace_tensor is None:
            cls.moe_workspace_tensor = open_workspace(expert_backend(mapping, config))
        return cls.moe_workspace_tensor

    @classmethod
    def get_moe_prepare_workspace(
        cls, mapping: Mapping, config: MnnvlConfig | None = None
    ) -> torch.Tensor:
        """The workspace of preparations, with the arguments of `get_moe_workspaces`."""
        cls._same_mapping(mapping)
        if cls.moe_prepare_workspace_tensor is None:
            cls.moe_prepare_workspace_tensor = open_workspace(expert_backend(mapping, config))
        return cls.moe_prepare_workspace_tensor

    @classmethod
    def _same_mapping(cls, mapping: Mapping) -> None:
        if cls.moe_mapping not in (None, mapping):
            raise ValueError("`mapping` must be that of the first call")
        cls.moe_mapping = mapping

    @staticmethod
    def compute_target_rank_id(
        token_selected_experts: torch.Tensor, expert_count: int, ep_size: int
    ) -> torch.Tensor:
        """The rank of each expert: ``expert // (expert_count / ep_size)``, int32."""
        if expert_count % checks.count("ep_size", ep_size):
            raise ValueError(f"`expert_count` must be a multiple of {ep_size}, got {expert_count}")
        experts = checks.tensor("token_selected_experts", token_selected_experts)
        return (experts // (expert_count // ep_size)).to(torch.int32)

    @staticmethod
    def mnnvl_moe_alltoallv_prepare_without_allgather(
        expert_ids: torch.Tensor,
        scales: torch.Tensor | None,
        expert_statics: torch.Tensor | None,
        workspace: torch.Tensor,
        max_token_count_per_rank: int,
        ep_rank: int,
        ep_size: int,
        expert_count: int,
        slot_count: int,
        top_k: int,
    ) -> tuple[MoEAlltoallInfo, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Send the experts of tokens, and what follows from them. Collective.

        Parameters
        ----------
        expert_ids : torch.Tensor
            ``[tokens, top_k]``, int32, contiguous: slots of experts, 0 to ``slot_count - 1``;
            others are nowhere. Rank r has ``slot_count / ep_size`` of them, in order.
        scales : torch.Tensor, optional
            ``[tokens, top_k]``, float32: weights.
        expert_statics : torch.Tensor, optional
            ``[expert_count]``, int32: gathered from all ranks.
        workspace : torch.Tensor
            The one of `get_moe_prepare_workspace`.
        max_token_count_per_rank : int
            Most tokens of a rank in this batch, alike on all ranks.
        ep_rank, ep_size : int
            The workspace's own.
        expert_count, slot_count, top_k : int
            Experts; slots of all ranks, a multiple of them; choices of a token.

        Returns
        -------
        info : MoEAlltoallInfo
            For `mnnvl_moe_alltoallv` and `mnnvl_moe_alltoallv_combine`.
        experts : torch.Tensor
            ``[ep_size * max_token_count_per_rank, top_k]``: of the received tokens; `slot_count` in
            rows without one.
        scales : torch.Tensor or None
            The same of `scales`; 0 where the expert is `slot_count`.
        statics : torch.Tensor or None
            ``[ep_size, expert_count]``.

        Raises
        ------
        TypeError, ValueError
            If an argument is not allowed, before anything is sent.
        CommError
            If an earlier call on the workspace has timed out.
        """
        exchange = _opened(workspace, ep_rank, ep_size)
        experts = checks.contiguous("expert_ids", expert_ids, 2)
        checks.dtype("expert_ids", experts.dtype, (torch.int32,))
        checks.count("max_token_count_per_rank", max_token_count_per_rank)
        if experts.shape[1] != top_k:
            raise ValueError(f"`expert_ids` must have {top_k} columns, got {list(experts.shape)}")
        sent = [experts]
        if scales is not None:
            if checks.contiguous("scales", scales, 2).shape != experts.shape:
                raise ValueError(f"`scales` must have the shape of `expert_ids`, {experts.shape}")
            checks.dtype("scales", scales.dtype, (torch.float32,))
            sent.append(scales)
        if expert_statics is not None and expert_statics.numel() != expert_count:
            raise ValueError(f"`expert_statics` must have {expert_count} elements")
        rows = ep_size * max_token_count_per_rank
        info = MoEAlltoallInfo(None, None, None, None, None, None, rows, experts, slot_count)
        received, statics, _ = exchange.there_and_back(
            info, sent, stats=expert_statics, marks_experts=True
        )
        if scales is None:
            return info, received[0], None, statics
        weights = received[1].masked_fill_(received[0] == slot_count, 0)
        return info, received[0], weights, statics

    @staticmethod
    def mnnvl_moe_alltoallv(
        x: torch.Tensor,
        alltoall_info: MoEAlltoallInfo,
        workspace: torch.Tensor,
        ep_rank: int,
        ep_size: int,
    ) -> torch.Tensor:
        """Send rows of tokens to the ranks of their experts. Collective.

        `x` is ``[tokens, ...]``, contiguous, any dtype; `workspace` of `get_moe_workspaces`. The
        result is ``[ep_size * max_token_count_per_rank, ...]``; rows without a token hold anything.
        Raises a TypeError or ValueError if an argument is not allowed, before anything is sent.
        """
        exchange = _opened(workspace, ep_rank, ep_size)
        if len(checks.contiguous("x", x)) != len(alltoall_info.experts):
            raise ValueError(f"`x` must have {len(alltoall_info.experts)} rows, got {len(x)}")
        (received,), _, _ = exchange.there_and_back(alltoall_info, [x])
        return received

    @staticmethod
    def mnnvl_moe_alltoallv_combine(
        x: torch.Tensor,
        alltoall_info: MoEAlltoallInfo,
        workspace: torch.Tensor,
        ep_rank: int,
        ep_size: int,
        top_k: int,
        token_count: int,
    ) -> torch.Tensor:
        """Add what the experts of all ranks made of each token. Collective.

        `x` is ``[ep_size * max_token_count_per_rank, hidden]``, contiguous, float16, bfloat16 or
        float32: for each received token the weighted sum over this rank's experts; `hidden` is a
        multiple of 8. Returns ``[token_count, hidden]``, the sum in float32 in the order of the
        ranks, rounded once. Raises a TypeError or ValueError if an argument is not allowed, before
        anything is sent.
        """
        exchange = _opened(workspace, ep_rank, ep_size)
        info = alltoall_info
        if (token_count, top_k) != tuple(info.experts.shape):
            raise ValueError(
                f"`token_count` and `top_k` must be those of the preparation, "
                f"{list(info.experts.shape)}, got {token_count} and {top_k}"
            )
        rows = info.local_token_allocation_count
        if len(checks.contiguous("x", x, 2)) != rows:
            raise ValueError(f"`x` must have {rows} rows, got {len(x)}")
        outputs = x.view(ep_size, rows // ep_size, x.shape[1])
        _, _, total = exchange.there_and_back(info, [info.experts], outputs)
        assert total is not None
        return total
