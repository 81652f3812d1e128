"""The memory of one group of ranks as kernels see it: include/flashinfer/comm/workspace.h."""

from __future__ import annotations

import ctypes
import socket
from typing import Any

import torch

from .. import env
from .._common.kernels import Kernel
from .comm_backend import current_device
from .cuda_ipc import SharedBuffers

MAX_RANKS = 16
NUM_FLAGS = 512
_CONTROL_BYTES = 256
_FLAG_BYTES = 4 * MAX_RANKS * NUM_FLAGS
SENTINEL = 0xFF  # every byte of comm::kSentinel

_WHERE = (
    "data of a one-shot all-reduce",
    "data of a reduce-scatter",
    "data of an all-gather",
    "data of an exchange",
    "tokens for its experts",
    "outputs of experts",
)


class Failure(ctypes.Structure):
    """comm::Failure."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("is_set", "peer", "calls", "where")]


class CommWorkspace(ctypes.Structure):
    """comm::CommWorkspace."""

    _fields_ = [
        ("buffers", ctypes.c_void_p * MAX_RANKS),
        ("flags", ctypes.c_void_p * MAX_RANKS),
        ("control", ctypes.c_void_p),
        ("half_bytes", ctypes.c_int64),
        ("rank", ctypes.c_uint32),
        ("world_size", ctypes.c_uint32),
        ("max_ctas", ctypes.c_uint32),
        ("num_flags", ctypes.c_uint32),
    ]


class CommError(RuntimeError):
    """A wait for another rank that timed out."""


def agree(backend: Any, what: str, facts: dict[str, Any]) -> None:
    """Raise a ValueError on all ranks, which names the differences, unless `facts` are the same."""
    everyone = backend.allgather(facts)
    different = {
        name: [each.get(name) for each in everyone]
        for name in facts
        if any(each.get(name) != everyone[0].get(name) for each in everyone)
    }
    if different:
        listed = "; ".join(f"`{name}` is {values} by rank" for name, values in different.items())
        raise ValueError(f"{what} must be called alike by all ranks: {listed}")


def ctas_of_ranks(uuids: list[str], sms: list[int]) -> int:
    """CTAs of each rank's grids, by every rank's GPU and its SMs, which ranks may share.

    Alike on all ranks, for a row is finished only where the same CTA has it on every rank.
    """
    return max(1, min(count // uuids.count(uuid) for uuid, count in zip(uuids, sms, strict=True)))


class PeerWorkspace:
    """Receive buffers of all ranks in two halves, flags, and the control block of this rank.

    Parameters
    ----------
    half_bytes : int
        Bytes of one half of a rank's receive buffer.
    backend : CommBackend
        The ranks, all of one host. Creation and :meth:`close` are collective.
    fill : int
        Byte with which the receive buffers begin.
    """

    def __init__(self, half_bytes: int, backend: Any, fill: int = SENTINEL) -> None:
        self.backend = backend
        self.rank, self.world_size = backend.Get_rank(), backend.Get_size()
        self.device = current_device()
        self.half_bytes = -(-half_bytes // 256) * 256
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        hosts = backend.allgather((socket.gethostname(), _uuid(), sms))
        if len({host for host, _, _ in hosts}) != 1:
            raise ValueError(
                "`comm_backend` must have processes of one host; beyond it, use torch.distributed"
            )
        uuids = [uuid for _, uuid, _ in hosts]
        self._buffers = SharedBuffers(2 * self.half_bytes, backend, fill)
        self._flags = SharedBuffers(_FLAG_BYTES, backend)
        self._control = torch.zeros(_CONTROL_BYTES, dtype=torch.uint8, device=self.device)
        self._failure = torch.zeros(ctypes.sizeof(Failure), dtype=torch.uint8, pin_memory=True)
        self.struct = CommWorkspace(
            (ctypes.c_void_p * MAX_RANKS)(*self._buffers.pointers),
            (ctypes.c_void_p * MAX_RANKS)(*self._flags.pointers),
            self._control.data_ptr(),
            self.half_bytes,
            self.rank,
            self.world_size,
            ctas_of_ranks(uuids, [count for _, _, count in hosts]),
            NUM_FLAGS,
        )
        # Bindings take the bytes of the struct.
        self.bytes = torch.frombuffer(self.struct, dtype=torch.uint8)
        self.is_shared_device = uuids.count(uuids[self.rank]) > 1
        self.max_ctas = self.struct.max_ctas
        self._failed = Failure.from_address(self._failure.data_ptr())
        self._closed = False
        self._control[16:24].view(torch.int64).fill_(self._failure.data_ptr())
        self.set_timeout(env.FLASHINFER_COMM_TIMEOUT.get())
        torch.cuda.synchronize()
        backend.barrier()

    def set_timeout(self, seconds: float) -> None:
        """How long kernels wait for another rank, also those of captured graphs."""
        if not 0 < seconds <= 1e9:
            raise ValueError(f"`seconds` must be positive and at most 1e9, got {seconds}")
        self._control[8:16].view(torch.int64).fill_(int(seconds * 1e9))

    def check(self) -> None:
        """Raise an error if the workspace is closed, or a wait of an earlier call timed out."""
        if self._failed.is_set:
            failed = self._failed
            raise CommError(
                f"rank {self.rank} waited in vain for {_WHERE[failed.where]} of rank "
                f"{failed.peer}, after {failed.calls} calls modulo 65536 on the workspace: that "
                "rank died, or made another call"
            )
        if self._closed:
            raise ValueError("`workspace` is destroyed")

    def check_place(self, names: tuple[str, str], rank: int, world_size: int) -> None:
        """Refuse a call by another rank or for another number of ranks; `names`: of these two."""
        if (rank, world_size) != (self.rank, self.world_size):
            raise ValueError(
                f"`{names[0]}` and `{names[1]}` must be those of the workspace, {self.rank} and "
                f"{self.world_size}, got {rank} and {world_size}"
            )

    def launch(self, kernel: Kernel, first: torch.Tensor, *arguments: Any) -> None:
        """Call a binding whose first argument is the workspace. All kernels start here.

        `first` is on the device of the call's other tensors, as the binding checks.
        """
        self.check()
        device = first.get_device()
        if device >= 0 and device != self.device.index:  # the binding refuses the CPU
            raise ValueError(
                f"`workspace` is on {self.device} and the tensors of the call on cuda:{device}: "
                "they must be on one device"
            )
        kernel(self.bytes, first, *arguments)

    def close(self, collective: bool = True) -> None:
        """Free everything. Collective unless told otherwise, see `SharedBuffers.close`."""
        if self._closed:
            return
        self._closed = True
        try:
            self._buffers.close(collective)
        finally:
            self._flags.close(collective)


def _uuid() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
