"""Green contexts of CUDA's driver, which PyTorch does not offer as partitions.

Six functions of a stable C interface are called as they stand; names, values and the layout of
structures are those of ``cuda.h`` (CUDA 12.4 and later).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from .arch import get_device_index, get_device_sm_count

_TYPE_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, which is required
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class CUdevSmResource(ctypes.Structure):
    """Multiprocessors of a resource; drivers before CUDA 13 leave all but the count zero."""

    _fields_ = [
        ("smCount", ctypes.c_uint),
        ("minSmPartitionSize", ctypes.c_uint),
        ("smCoscheduledAlignment", ctypes.c_uint),
    ]


class _Kinds(ctypes.Union):
    _fields_ = [("sm", CUdevSmResource), ("_oversize", ctypes.c_ubyte * 48)]


class CUdevResource(ctypes.Structure):
    """A set of multiprocessors, or a part of one: ``sm.smCount`` is their number."""

    _anonymous_ = ["_kinds"]
    _fields_ = [("type", ctypes.c_int), ("_padding", ctypes.c_ubyte * 92), ("_kinds", _Kinds)]

    def __repr__(self) -> str:
        return f"CUdevResource(sm.smCount={self.sm.smCount})"


@functools.cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"green contexts need CUDA's driver: {error}") from error


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises
    ------
    RuntimeError
        If the driver lacks it, or it fails; the message has the driver's name of the error.
    """
    try:
        function = getattr(_library(), name)
    except AttributeError:
        raise RuntimeError(f"{name} needs a driver of CUDA 12.4 or later") from None
    status = function(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        _library().cuGetErrorName(status, ctypes.byref(text))
        error = (text.value or b"unknown error").decode()
        raise RuntimeError(f"{name} failed: {error} (CUDA error code={status})")


def sm_resource(device: int) -> CUdevResource:
    """All multiprocessors of a device, by its handle."""
    found = CUdevResource()
    call("cuDeviceGetDevResource", ctypes.c_int(device), ctypes.byref(found), _TYPE_SM)
    return found


def split(
    resource: CUdevResource, groups: int, least: int
) -> tuple[list[CUdevResource], CUdevResource]:
    """Groups of at least `least` multiprocessors, as many as fit up to `groups`, and the rest."""
    found, rest = (CUdevResource * groups)(), CUdevResource()
    count = ctypes.c_uint(groups)
    call(
        "cuDevSmResourceSplitByCount",
        found,
        ctypes.byref(count),
        ctypes.byref(resource),
        ctypes.byref(rest),
        ctypes.c_uint(0),
        ctypes.c_uint(least),
    )
    return list(found)[: count.value], rest


def green_context(device: int, resource: CUdevResource) -> ctypes.c_void_p:
    """A green context with the multiprocessors of a resource. Nobody destroys it."""
    description, context = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(resource), 1)
    flags = ctypes.c_uint(_DEFAULT_STREAM)
    call("cuGreenCtxCreate", ctypes.byref(context), description, ctypes.c_int(device), flags)
    return context


def resource_of(context: ctypes.c_void_p) -> CUdevResource:
    """The multiprocessors of a green context."""
    found = CUdevResource()
    call("cuGreenCtxGetDevResource", context, ctypes.byref(found), _TYPE_SM)
    return found


def stream_of(context: ctypes.c_void_p) -> int:
    """Handle of a new stream in a green context. Nobody destroys it."""
    stream = ctypes.c_void_p()
    flags = ctypes.c_uint(_NON_BLOCKING)
    call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, flags, ctypes.c_int(0))
    return stream.value or 0


def get_stream_sm_count(device: torch.device) -> int:
    """Multiprocessors that the current stream of a device may use: its green context's, or all."""
    total = get_device_sm_count(device)
    stream = torch.cuda.current_stream(get_device_index(device)).cuda_stream
    if stream == 0 or not hasattr(_library(), "cuStreamGetGreenCtx"):
        return total
    context = ctypes.c_void_p()
    call("cuStreamGetGreenCtx", ctypes.c_void_p(stream), ctypes.byref(context))
    return resource_of(context).sm.smCount if context else total
