"""The interface of a group of processes that communication uses."""

from __future__ import annotations

from typing import Any, Protocol


class CommBackend(Protocol):
    """A group of processes, by the names of MPI; engines implement it over their own groups."""

    def Get_rank(self) -> int:
        """Number of this process in the group."""
        ...

    def Get_size(self) -> int:
        """Number of processes in the group."""
        ...

    def allgather(self, data: Any) -> Any:
        """The objects of all processes, in the order of their ranks."""
        ...

    def bcast(self, data: Any, root: int) -> Any:
        """The object of the process `root`."""
        ...

    def barrier(self) -> None:
        """Return when every process of the group is here."""
        ...

    def Split(self, color: int, key: int) -> CommBackend:
        """The group of the processes with the same `color`, ordered by `key`."""
        ...
