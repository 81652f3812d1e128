"""Shared memory of ranks without a GPU: who frees it, and when."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flashinfer import comm
from flashinfer.comm import cuda_ipc
from flashinfer.comm.comm_backend import TorchDistBackend
from flashinfer.comm.cuda_ipc import SharedBuffers, cudaIpcMemHandle_t
from flashinfer.comm.peer_workspace import PeerWorkspace, ctas_of_ranks


class Runtime:
    """Addresses instead of memory: what is allocated here, and open of other processes."""

    numbers = itertools.count(1)
    here: set[int] = set()
    opened: set[int] = set()

    def cudaMalloc(self, size: int) -> ctypes.c_void_p:
        address = os.getpid() << 20 | next(self.numbers)
        self.here.add(address)
        return ctypes.c_void_p(address)

    def cudaIpcGetMemHandle(self, pointer: ctypes.c_void_p) -> cudaIpcMemHandle_t:
        assert pointer.value is not None
        return cudaIpcMemHandle_t.from_buffer_copy(pointer.value.to_bytes(64, "little"))

    def cudaIpcOpenMemHandle(self, handle: cudaIpcMemHandle_t) -> ctypes.c_void_p:
        address = int.from_bytes(bytes(handle), "little")
        self.opened.add(address)
        return ctypes.c_void_p(address)

    def cudaIpcCloseMemHandle(self, pointer: ctypes.c_void_p) -> None:
        self.opened.remove(pointer.value)

    def cudaFree(self, pointer: ctypes.c_void_p) -> None:
        self.here.remove(pointer.value)

    def cudaMemset(self, pointer: ctypes.c_void_p, value: int, count: int) -> None:
        """There are no bytes."""

    def cudaDeviceSynchronize(self) -> None:
        """There is no device."""


def workspace() -> comm.TRTLLMAllReduceFusionWorkspace:
    """One whose memory is that of the runtime above."""
    peers = object.__new__(PeerWorkspace)
    peers._closed, backend = False, TorchDistBackend()
    peers._buffers, peers._flags = SharedBuffers(64, backend), SharedBuffers(8, backend)
    made = object.__new__(comm.TRTLLMAllReduceFusionWorkspace)
    made._peers, made._destroyed = peers, False
    return made


def _process(rank: int, port: int, body: Callable[[int], None]) -> None:
    cuda_ipc.CudaRTLibrary = Runtime  # type: ignore[misc,assignment]
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    body(rank)
    if dist.is_initialized():
        dist.destroy_process_group()


def in_two_processes(body: Callable[[int], None]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_process, (port, body), nprocs=2, start_method="fork")


def test_destroy_waits_for_nobody() -> None:
    def body(rank: int) -> None:
        mine = workspace()
        assert len(Runtime.here) == len(Runtime.opened) == 2
        dist.destroy_process_group()
        if rank == 1:
            return  # without a word
        mine.destroy()
        mine.destroy()
        assert not Runtime.opened and len(Runtime.here) == 2, "rank 1 may have it open"
        with pytest.raises(ValueError, match="`workspace` is destroyed"):
            mine.checkpoint_restore(None)

    in_two_processes(body)


def test_the_next_workspace_of_the_ranks_frees_the_last_one() -> None:
    def body(rank: int) -> None:
        first, kept = workspace(), workspace()
        first.destroy()
        if rank == 0:
            kept.destroy()  # the other rank has it open
        workspace()
        assert len(Runtime.here) == len(Runtime.opened) + (2 if rank == 0 else 0) == 4
        kept.destroy()
        workspace()
        assert len(Runtime.here) == len(Runtime.opened) == 4

    in_two_processes(body)


def test_a_workspace_that_is_prepared_for_a_checkpoint_is_freed() -> None:
    def body(rank: int) -> None:
        mine = workspace()
        mine.checkpoint_prepare()
        mine.destroy()
        assert not Runtime.here and not Runtime.opened

    in_two_processes(body)


def test_both_buffers_are_closed_when_a_rank_is_gone() -> None:
    def body(rank: int) -> None:
        mine = workspace()
        dist.destroy_process_group()
        with pytest.raises((RuntimeError, ValueError)):
            mine.checkpoint_prepare()
        assert not Runtime.opened and len(Runtime.here) == 2

    in_two_processes(body)


def test_grids_are_alike_where_ranks_share_gpus_unevenly() -> None:
    assert ctas_of_ranks(["a", "b"], [132, 132]) == 132
    assert ctas_of_ranks(["a", "a", "b"], [132, 132, 132]) == 66
    assert ctas_of_ranks(["a", "b"], [132, 16]) == 16
    assert ctas_of_ranks(["a"] * 8, [4] * 8) == 1
