"""Which way a Ulysses exchange takes: peer memory of one host, or NCCL."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch

from .._common import checks
from ..jit.comm import MAX_RANKS
from .comm_backend import resolve_backend

ULYSSES_BACKENDS = ("auto", "nvlink", "nccl")


class UlyssesBackendError(RuntimeError):
    """`backend` "nvlink" is asked for where ranks cannot access each other's memory."""


@dataclass(frozen=True)
class UlyssesRankTopology:
    """One rank's GPU.

    Attributes
    ----------
    host : str
        Name of the host.
    device : str
        UUID of the GPU; empty without one.
    peers : frozenset of str
        UUIDs of the GPUs of this process whose memory it can access, its own included.
    visible : frozenset of str
        UUIDs of the GPUs that this process sees.
    """

    host: str
    device: str
    peers: frozenset[str]
    visible: frozenset[str]


@dataclass(frozen=True)
class UlyssesBackendDecision:
    """The backend, ``"nvlink"`` or ``"nccl"``, and why."""

    backend: str
    reason: str


def probe_ulysses_rank_topology(device: Any | None = None) -> UlyssesRankTopology:
    """The topology that this process sees from `device`; None: the current GPU."""
    if not torch.cuda.is_available():
        return UlyssesRankTopology(socket.gethostname(), "", frozenset(), frozenset())
    index = torch.device("cuda" if device is None else device).index
    if index is None:
        index = torch.cuda.current_device()
    uuids = [
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    ]
    peers = {
        uuid
        for i, uuid in enumerate(uuids)
        if i == index or torch.cuda.can_device_access_peer(index, i)
    }
    return UlyssesRankTopology(
        socket.gethostname(), uuids[index], frozenset(peers), frozenset(uuids)
    )


def decide_ulysses_backend(
    backend: str, topologies: list[UlyssesRankTopology]
) -> UlyssesBackendDecision:
    """The backend for the ranks with these topologies, the same on every rank.

    Peer memory is taken if all ranks are on one host, are at most 16, and no GPU is known to be out
    of another one's reach. A GPU that a process does not see is tried when memory is opened.

    Raises
    ------
    UlyssesBackendError
        If `backend` is ``"nvlink"`` and that does not hold.
    """
    checks.choice("backend", backend, ULYSSES_BACKENDS)
    reason = ""
    if not 2 <= len(topologies) <= MAX_RANKS:
        reason = f"{len(topologies)} ranks, not 2 to {MAX_RANKS}"
    elif len({each.host for each in topologies}) > 1:
        reason = "ranks are on several hosts"
    elif not all(each.device for each in topologies):
        reason = "a rank has no GPU"
    for rank, one in enumerate(topologies):
        for other, two in enumerate(topologies):
            if two.device in one.visible and two.device not in one.peers:
                reason = reason or f"rank {rank} cannot access the memory of rank {other}"
    if backend == "nvlink" and reason:
        raise UlyssesBackendError(f"`backend` 'nvlink' cannot serve: {reason}")
    if backend == "nccl":
        return UlyssesBackendDecision("nccl", "asked for")
    if reason:
        return UlyssesBackendDecision("nccl", reason)
    return UlyssesBackendDecision("nvlink", "all ranks access each other's memory")


def resolve_ulysses_backend(
    backend: str = "auto", group: Any | None = None, device: Any | None = None
) -> UlyssesBackendDecision:
    """`decide_ulysses_backend` of the ranks of `group`. Collective.

    `group`: a process group, or an object with the methods of `CommBackend`; None: all processes.
    """
    ranks = resolve_backend(None, group)
    return decide_ulysses_backend(
        backend, list(ranks.allgather(probe_ulysses_rank_topology(device)))
    )
