"""Copies between host and device, for which neither stops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on the device, through pinned memory: copies from other memory wait for it."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@cache
def _to_host_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy on the host, and what to wait for before it is read.

    The current stream does not stop for the copy. What it was given before has ended by then, too.
    Hold the tensor until then: its memory may get another use, which the copy does not know of.
    """
    if not tensor.is_cuda:
        return tensor, None
    beside = _to_host_stream(tensor.device)
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        copy = tensor.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
    return copy, arrived
