"""Groups of processes over which workspaces are set up: `torch.distributed`, or threads."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from .._compile.handles import Planned

__all__ = ["ThreadBackend", "TorchDistBackend"]


class TorchDistBackend(Planned):
    """The interface `CommBackend` on a process group of ``torch.distributed``.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The group; None: all processes. Pass the group wherever there is more than one: a collective
        over all processes hangs if only some call it.

    Raises
    ------
    RuntimeError
        If ``torch.distributed`` is not initialised.
    """

    def __init__(self, group: Any | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call init_process_group first"
            )
        self._group = group

    def Get_rank(self) -> int:
        """Number of this process in the group."""
        return dist.get_rank(self._group)

    def Get_size(self) -> int:
        """Number of processes in the group."""
        return dist.get_world_size(self._group)

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """The objects of all processes, in the order of their ranks."""
        gathered: list[Any] = [None] * self.Get_size()
        dist.all_gather_object(gathered, data, group=self._group)
        return tuple(gathered)

    def bcast(self, data: Any, root: int) -> Any:
        """The object of the process `root`, a rank of the group."""
        objects = [data]
        source = root if self._group is None else dist.get_global_rank(self._group, root)
        dist.broadcast_object_list(objects, src=source, group=self._group)
        return objects[0]

    def barrier(self) -> None:
        """Return when every process of the group is here."""
        dist.barrier(group=self._group)

    def Split(self, color: int, key: int) -> TorchDistBackend:
        """The group of the processes with the same `color`, ordered by `key`. All must call."""
        calls = self.allgather((color, key, dist.get_rank()))
        mine = None
        for each in sorted({c for c, _, _ in calls}):
            ranks = [rank for c, _, rank in sorted(calls, key=lambda call: call[1:]) if c == each]
            group = dist.new_group(ranks)
            if each == color:
                mine = group
        return TorchDistBackend(mine)


class ThreadBackend(Planned):
    """The interface `CommBackend` for ranks that are threads of one process.

    With it one process runs every rank of a protocol: on one GPU, whose streams are then the ranks,
    or on several. :meth:`create` makes the backends of all ranks.
    """

    def __init__(self, rank: int, barrier: threading.Barrier, board: dict[Any, list[Any]]) -> None:
        self._rank = rank
        self._barrier = barrier
        self._board = board
        self._turn = 0

    @classmethod
    def create(cls, world_size: int, timeout: float = 60.0) -> list[ThreadBackend]:
        """The backends of ranks 0 to ``world_size - 1``; `timeout` in seconds."""
        barrier = threading.Barrier(world_size, timeout=timeout)
        board: dict[Any, list[Any]] = {}
        return [cls(rank, barrier, board) for rank in range(world_size)]

    def Get_rank(self) -> int:
        """Number of this thread in the group."""
        return self._rank

    def Get_size(self) -> int:
        """Number of threads in the group."""
        return self._barrier.parties

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """The objects of all threads, in the order of their ranks."""
        self._turn += 1
        self._board.setdefault(self._turn, [None] * self.Get_size())[self._rank] = data
        self._barrier.wait()
        gathered = tuple(self._board[self._turn])
        self._board.pop(self._turn - 1, None)
        return gathered

    def bcast(self, data: Any, root: int) -> Any:
        """The object of the thread `root`."""
        return self.allgather(data)[root]

    def barrier(self) -> None:
        """Return when every thread of the group is here."""
        self._barrier.wait()

    def abort(self) -> None:
        """Make every waiting thread of the group raise ``threading.BrokenBarrierError``."""
        self._barrier.abort()

    def Split(self, color: int, key: int) -> ThreadBackend:
        """The group of the threads with the same `color`, ordered by `key`. All must call."""
        calls = self.allgather((color, key, self._rank))
        ranks = [rank for c, _, rank in sorted(calls, key=lambda call: call[1:]) if c == color]
        made = ThreadBackend.create(len(ranks)) if self._rank == ranks[0] else None
        return self.allgather(made)[ranks[0]][ranks.index(self._rank)]


def resolve_backend(comm_backend: Any | None, group: Any | None) -> Any:
    """`comm_backend`, else one over `group`, which may itself have the methods of CommBackend."""
    if comm_backend is not None and group is not None:
        size = dist.get_world_size(group)
        if comm_backend.Get_size() != size:
            raise ValueError(
                f"`comm_backend` has {comm_backend.Get_size()} processes and `group` {size}: they "
                "must be of the same processes"
            )
    if comm_backend is not None:
        return comm_backend
    return group if hasattr(group, "Get_rank") else TorchDistBackend(group)


def current_device() -> torch.device:
    """The current GPU."""
    return torch.device("cuda", torch.cuda.current_device())
