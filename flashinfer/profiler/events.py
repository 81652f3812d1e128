"""Events in the buffer of a profiled kernel."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from .._common.checks import tensor as check_tensor

_HALF = 1 << 32


class EventType(enum.Enum):
    """Kind of an event."""

    kBegin = 0
    kEnd = 1
    kInstant = 2


class Event(NamedTuple):
    """One event, at nanoseconds after the earliest of its buffer."""

    nanoseconds: int
    block: int
    group: int
    event: int
    kind: EventType
    multiprocessor: int


def decode_tag(tag: int, num_blocks: int, num_groups: int) -> tuple[int, int, int, int, int]:
    """Take a tag apart.

    Parameters
    ----------
    tag : int
        Low half of an event's word: bits 0-1 kind, 2-11 event, 12-23 block and group, 24-31
        multiprocessor.
    num_blocks : int
        Blocks of the launch, for callers of FlashInfer; a tag says its block without it.
    num_groups : int
        Groups of a block.

    Returns
    -------
    (block_idx, group_idx, event_idx, event_type, sm_id) : tuple of int
        `event_type` is the value of an `EventType`.
    """
    place = (tag >> 12) & 0xFFF
    return place // num_groups, place % num_groups, (tag >> 2) & 0x3FF, tag & 3, (tag >> 24) & 0xFF


def read_events(profiler_buffer: torch.Tensor) -> list[Event]:
    """The events of a buffer, in the order of their times.

    Parameters
    ----------
    profiler_buffer : torch.Tensor
        ``[words]``, uint64 or int64, as the kernel left it; any device.

    Raises
    ------
    TypeError, ValueError
        If it is no such tensor, holds no launch, or a kind that there is not.
    """
    check_tensor("profiler_buffer", profiler_buffer, 1)
    if profiler_buffer.dtype not in (torch.uint64, torch.int64):
        raise ValueError(f"`profiler_buffer` must be uint64, got {profiler_buffer.dtype}")
    words = [word % (1 << 64) for word in profiler_buffer.cpu().view(torch.int64).tolist()]
    num_blocks, num_groups = (words[0] % _HALF, words[0] // _HALF) if words else (0, 0)
    if num_blocks == 0 or num_groups == 0:
        raise ValueError("`profiler_buffer` must hold a launch, got an empty one")
    written = [word for word in words[1:] if word]
    # 32 bits of nanoseconds wrap: times are differences to one of them, of at most 2.1 seconds.
    times = [_signed(word // _HALF - written[0] // _HALF) for word in written]
    first = min(times, default=0)
    events = []
    for word, time in zip(written, times, strict=True):
        block, group, event, kind, sm = decode_tag(word % _HALF, num_blocks, num_groups)
        if kind > EventType.kInstant.value:
            raise ValueError(f"`profiler_buffer` must hold events, got the word {word:#x}")
        events.append(Event(time - first, block, group, event, EventType(kind), sm))
    # Of equal times, an end stands before the next begin; kinds of one track keep their order.
    return sorted(events, key=lambda event: event.nanoseconds)


def _signed(difference: int) -> int:
    return (difference + _HALF // 2) % _HALF - _HALF // 2
