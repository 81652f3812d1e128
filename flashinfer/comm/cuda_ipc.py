"""Device memory that the processes of one host share, through CUDA's IPC handles."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import torch

from .comm_backend import resolve_backend

_ENABLE_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_PEER_ACCESS_ALREADY_ENABLED = 704


class cudaIpcMemHandle_t(ctypes.Structure):
    """CUDA's handle of an allocation, 64 bytes that another process opens."""

    _fields_ = [("internal", ctypes.c_byte * 64)]


def find_loaded_library(lib_name: str) -> str | None:
    """Path of a shared library of this process whose file name begins with `lib_name`, or None."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if os.path.basename(path).startswith(lib_name):
                return path
    return None


class CudaRTLibrary:
    """The functions of CUDA's runtime that PyTorch does not offer.

    Parameters
    ----------
    so_file : str, optional
        The library; None: the one that PyTorch has loaded.

    Raises
    ------
    RuntimeError
        If no runtime is loaded, or a function fails; the message has CUDA's text.
    """

    def __init__(self, so_file: str | None = None) -> None:
        path = so_file or find_loaded_library("libcudart")
        if path is None:
            raise RuntimeError("CUDA's runtime is not loaded: PyTorch was built without CUDA")
        self._library = ctypes.CDLL(path)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def CUDART_CHECK(self, result: int) -> None:
        """Raise an error unless `result` is success."""
        if result != 0:
            raise RuntimeError(f"CUDA: {self.cudaGetErrorString(result)} ({result})")

    def cudaGetErrorString(self, error: int) -> str:
        """CUDA's text of an error."""
        return self._library.cudaGetErrorString(error).decode()

    def cudaSetDevice(self, device: int) -> None:
        """Make a device current."""
        self.CUDART_CHECK(self._library.cudaSetDevice(device))

    def cudaDeviceSynchronize(self) -> None:
        """Wait for all work of the current device."""
        self.CUDART_CHECK(self._library.cudaDeviceSynchronize())

    def cudaDeviceReset(self) -> None:
        """Destroy everything of this process on the current device."""
        self.CUDART_CHECK(self._library.cudaDeviceReset())

    def cudaMalloc(self, size: int) -> ctypes.c_void_p:
        """Allocate `size` bytes on the current device."""
        pointer = ctypes.c_void_p()
        self.CUDART_CHECK(self._library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)))
        return pointer

    def cudaFree(self, devPtr: ctypes.c_void_p) -> None:
        """Free an allocation."""
        self.CUDART_CHECK(self._library.cudaFree(devPtr))

    def cudaMemset(self, devPtr: ctypes.c_void_p, value: int, count: int) -> None:
        """Set `count` bytes."""
        self.CUDART_CHECK(self._library.cudaMemset(devPtr, value, ctypes.c_size_t(count)))

    def cudaMemcpy(self, dst: ctypes.c_void_p, src: ctypes.c_void_p, count: int) -> None:
        """Copy `count` bytes between any two places."""
        kind = 4  # cudaMemcpyDefault
        self.CUDART_CHECK(self._library.cudaMemcpy(dst, src, ctypes.c_size_t(count), kind))

    def cudaIpcGetMemHandle(self, devPtr: ctypes.c_void_p) -> cudaIpcMemHandle_t:
        """The handle of an allocation, by which another process opens it."""
        handle = cudaIpcMemHandle_t()
        self.CUDART_CHECK(self._library.cudaIpcGetMemHandle(ctypes.byref(handle), devPtr))
        return handle

    def cudaIpcOpenMemHandle(self, handle: cudaIpcMemHandle_t) -> ctypes.c_void_p:
        """The address, in this process, of another process's allocation."""
        pointer = ctypes.c_void_p()
        self.CUDART_CHECK(
            self._library.cudaIpcOpenMemHandle(ctypes.byref(pointer), handle, _ENABLE_PEER_ACCESS)
        )
        return pointer

    def cudaIpcCloseMemHandle(self, devPtr: ctypes.c_void_p) -> None:
        """Close what `cudaIpcOpenMemHandle` opened."""
        self.CUDART_CHECK(self._library.cudaIpcCloseMemHandle(devPtr))

    def enable_peer_access(self, device: int) -> None:
        """Let the current device access the memory that this process has on another one."""
        result = self._library.cudaDeviceEnablePeerAccess(device, 0)
        if result == _PEER_ACCESS_ALREADY_ENABLED:
            self._library.cudaGetLastError()
        else:
            self.CUDART_CHECK(result)


_left: list[SharedBuffers] = []
_left_lock = threading.Lock()  # ranks may be threads


class SharedBuffers:
    """One allocation of each rank, open in every rank. Creation is collective, see :meth:`close`.

    Attributes
    ----------
    pointers : list of int
        Addresses of the ranks' allocations in this process.
    """

    def __init__(self, size: int, backend: Any, fill: int = 0) -> None:
        self._runtime = CudaRTLibrary()
        self.size, self.backend = size, backend
        self.rank, self.ranks = backend.Get_rank(), range(backend.Get_size())
        self._is_closed = False
        device = torch.cuda.current_device()
        torch.cuda.synchronize()
        self._own: ctypes.c_void_p | None = self._runtime.cudaMalloc(size)
        self._runtime.cudaMemset(self._own, fill, size)
        self._runtime.cudaDeviceSynchronize()
        handle = bytes(self._runtime.cudaIpcGetMemHandle(self._own))
        mine = (os.getpid(), device, self._own.value, handle)
        with _left_lock:
            left = [(each.name, each.rank) for each in _left]
        self._opened: list[ctypes.c_void_p] = []
        self.pointers: list[int] = []
        self.name: tuple[Any, ...] = ()
        try:
            everyone = backend.allgather((mine, left))
            self.name = tuple(entry for entry, _ in everyone)
            for entry in self.name:
                self.pointers.append(self._open(device, entry))
            _free_left({each for _, theirs in everyone for each in theirs})
        finally:
            backend.barrier()

    def _open(self, device: int, entry: tuple[int, int, int, bytes]) -> int:
        pid, owner_device, pointer, handle = entry
        if pid == os.getpid():  # a handle opens in other processes only
            if owner_device != device:
                self._runtime.enable_peer_access(owner_device)
            return pointer
        opened = self._runtime.cudaIpcOpenMemHandle(cudaIpcMemHandle_t.from_buffer_copy(handle))
        self._opened.append(opened)
        assert opened.value is not None
        return opened.value

    def close(self, collective: bool = True) -> None:
        """Close what other ranks own and, once they have closed this rank's memory, free that.

        Without `collective` nobody is waited for: the memory stays, as others may have it open,
        until a group with these ranks creates buffers and all say that they have closed it, or
        until the process ends.
        """
        if self._is_closed:
            return
        self._is_closed = True
        torch.cuda.synchronize()
        opened, self._opened = self._opened, []
        for pointer in opened:
            self._runtime.cudaIpcCloseMemHandle(pointer)
        if collective:
            self.backend.barrier()  # the owner frees after everyone has closed
            self._free()
        else:
            self.backend = None  # what stays keeps no group alive
            with _left_lock:
                _left.append(self)

    def _free(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            self._runtime.cudaFree(own)


def _free_left(closed: set[tuple[Any, int]]) -> None:
    """Free memory of this process that all ranks have closed; `closed`: names and ranks."""
    with _left_lock:
        free = [each for each in _left if all((each.name, r) in closed for r in each.ranks)]
        _left[:] = [each for each in _left if each not in free]
    for each in free:
        each._free()


_created: dict[int, SharedBuffers] = {}


def created(name: str, pointers: list[int], rank: int) -> SharedBuffers:
    """The open buffers with these addresses, by that of this rank; `name`: of the argument."""
    buffers = _created.get(pointers[rank]) if rank < len(pointers) else None
    if buffers is None:
        raise ValueError(f"`{name}` are of no open buffer, got {pointers}")
    return buffers


def create_shared_buffer(size_in_bytes: int, group: Any | None = None) -> list[int]:
    """Allocate device memory on each rank and open everyone's. Collective.

    Parameters
    ----------
    size_in_bytes : int
        Bytes of each rank's buffer, zeroed.
    group : torch.distributed.ProcessGroup or CommBackend, optional
        The ranks, all of one host; None: all processes.

    Returns
    -------
    list of int
        Addresses of the buffers of ranks 0, 1, ... in this process.

    Raises
    ------
    RuntimeError
        If memory is short or the GPUs cannot access each other's memory.
    """
    buffers = SharedBuffers(size_in_bytes, resolve_backend(None, group))
    _created[buffers.pointers[buffers.rank]] = buffers
    return buffers.pointers


def free_shared_buffer(pointers: list[int], group: Any | None = None) -> None:
    """Close and free what `create_shared_buffer` returned. Collective.

    Raises
    ------
    ValueError
        If `pointers` are not of a buffer that is open.
    """
    rank = resolve_backend(None, group).Get_rank()
    buffers = created("pointers", pointers, rank)
    del _created[pointers[rank]]
    buffers.close()
