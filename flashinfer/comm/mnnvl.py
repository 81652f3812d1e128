"""Names of FlashInfer's module for NVLink memory: the groups of processes, and what is refused.

There are no kernels here over NVLink multicast or fabric handles. The probes say so, and the
classes that hold such memory refuse to be made; `create_allreduce_fusion_workspace` with
``backend="trtllm"`` takes peer memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..compat.backends import BackendSupportedError
from .abstractions import CommBackend as CommBackend
from .comm_backend import TorchDistBackend as TorchDistBackend
from .comm_backend import resolve_backend


@dataclass
class MnnvlConfig:
    """How the ranks of a workspace are set up.

    Attributes
    ----------
    comm_backend : CommBackend, optional
        The ranks; None: all processes of ``torch.distributed``.
    allocation_granularity, fabric_page_size : int
        Sizes of fabric memory; not used here.
    """

    comm_backend: CommBackend | None = None
    allocation_granularity: int = 0
    fabric_page_size: int = 1 << 29


def is_multicast_supported(device_idx: int) -> bool:
    """False: there are no kernels over NVLink multicast."""
    return False


def is_mnnvl_fabric_supported(device_idx: int) -> bool:
    """False: there are no kernels over fabric handles."""
    return False


def all_ranks_agree(comm: CommBackend, local: bool) -> bool:
    """Whether `local` is true on every rank. Collective."""
    return all(comm.allgather(bool(local)))


def all_ranks_support_mnnvl(
    local_supported: bool,
    world_size: int,
    comm_backend: CommBackend | None = None,
    group: Any | None = None,
) -> bool:
    """Whether `local_supported` is true on every rank. Collective if `world_size` is not 1."""
    if world_size == 1:
        return bool(local_supported)
    return all_ranks_agree(resolve_backend(comm_backend, group), local_supported)


class _NeedsFabric:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise BackendSupportedError(
            f"{type(self).__name__} needs NVLink multicast or fabric memory, for which there are "
            "no kernels here: take create_allreduce_fusion_workspace(backend='trtllm')"
        )


class SymmDeviceMemory(_NeedsFabric):
    """Memory with a multicast address: refused."""


class McastGPUBuffer(_NeedsFabric):
    """A buffer with a multicast address: refused."""


class MnnvlMemory(_NeedsFabric):
    """Fabric memory of several hosts: refused. `MnnvlMoe` shares memory over CUDA IPC."""

    @staticmethod
    def initialize() -> None:
        """Nothing is to be done for memory over CUDA IPC."""

    @staticmethod
    def supports_mnnvl() -> bool:
        """False: there are no kernels over fabric memory."""
        return False
