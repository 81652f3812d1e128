"""Memory of functions that are given a group of ranks and no workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..jit.comm import check_ranks
from .comm_backend import resolve_backend
from .peer_workspace import PeerWorkspace

_opened: dict[tuple[str, int], tuple[Any, PeerWorkspace]] = {}


def memory_of(purpose: str, group: Any, half_bytes: Callable[[int], int]) -> PeerWorkspace:
    """The memory of a group, a call that needs more of it being collective.

    `half_bytes` says from the number of ranks how much is needed. `group`: a process group of
    ``torch.distributed``, or an object with the methods of `CommBackend`; None: all processes.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    found = _opened.get((purpose, id(group)))
    if found is not None and found[1].half_bytes >= half_bytes(found[1].world_size):
        return found[1]
    backend = resolve_backend(None, group)
    check_ranks(backend.Get_size())
    if found is not None:
        found[1].close()
    peers = PeerWorkspace(half_bytes(backend.Get_size()), backend)
    _opened[purpose, id(group)] = (group, peers)  # the group stays alive, and its id its own
    return peers


def free(purpose: str) -> None:
    """Free the memory of all groups. Collective in each."""
    for key in [key for key in _opened if key[0] == purpose]:
        _opened.pop(key)[1].close()
