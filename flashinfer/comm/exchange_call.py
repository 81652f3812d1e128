"""One call of the exchange's kernel, in parts that fit the workspace."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from .._common import checks
from .._common.kernels import Kernel, KernelTable
from ..jit.comm import ExchangeConfig, gen_exchange_module
from .peer_workspace import PeerWorkspace


class Segment(NamedTuple):
    """Blocks [outer, inner, row] of one tensor for each rank; strides in bytes.

    The order is the binding's.
    """

    source: torch.Tensor
    target: torch.Tensor
    shape: tuple[int, int, int]
    source_strides: tuple[int, int, int]
    target_strides: tuple[int, int, int]


def _get_kernel(dtype: torch.dtype, world_size: int, adds: bool) -> Kernel:
    config = ExchangeConfig(dtype, world_size, adds)
    return cast(Kernel, gen_exchange_module(config).build_and_load().exchange)


_kernels = KernelTable(_get_kernel)
_loading = threading.Lock()


def load(dtype: torch.dtype, world_size: int, adds: bool = False) -> Kernel:
    """Build and load a kernel once, also where several threads are ranks."""
    with _loading:
        key = (dtype, world_size, adds)
        if key not in _kernels:
            _kernels[key] = _get_kernel(*key)
        return _kernels[key]


def run(
    peers: PeerWorkspace,
    first: Segment,
    second: Segment | None = None,
    *,
    adds: bool = False,
    enable_pdl: bool | None = None,
) -> None:
    """Find the kernel and launch it."""
    key = (first.source.dtype, peers.world_size, adds)
    kernel = _kernels.get(key)
    if kernel is None:
        checks.cuda_tensors(input=first.source)
        kernel = load(*key)
    segments: tuple[Any, Any] = (tuple(first), None if second is None else tuple(second))
    peers.launch(kernel, first.source, segments, enable_pdl)


def output(name: str, given: Any, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """`given` after a check, or a new tensor."""
    if given is None:
        return like.new_empty(shape)
    checks.contiguous(name, given)
    if list(given.shape) != list(shape) or given.dtype != like.dtype:
        raise ValueError(
            f"`{name}` must have shape {list(shape)} and dtype {like.dtype}, got "
            f"{list(given.shape)} and {given.dtype}"
        )
    return given


def room(peers: PeerWorkspace) -> int:
    """Bytes of blocks to one rank that a call may have; a second segment begins on 256 bytes."""
    return (peers.half_bytes - 256) // (peers.world_size - 1)
