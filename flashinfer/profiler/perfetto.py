"""Trace files of profiled kernels."""

from __future__ import annotations

import json
from typing import Any

import torch

from .events import EventType, read_events

_PHASES = {EventType.kBegin: "B", EventType.kEnd: "E", EventType.kInstant: "i"}


def export_to_perfetto_trace(
    profiler_buffer: torch.Tensor, event_names: list[str], file_name: str
) -> None:
    """Write the events of a kernel as a trace file.

    Perfetto's viewer and ``chrome://tracing`` open it: a process for each multiprocessor, with a
    thread for each group of each block that ran there.

    Parameters
    ----------
    profiler_buffer : torch.Tensor
        ``[words]``, uint64 or int64, as the kernel left it; any device.
    event_names : list of str
        Names by number of the event.
    file_name : str
        The file, in the Trace Event Format (JSON).

    Raises
    ------
    TypeError, ValueError
        If `profiler_buffer` holds no events of a launch, or one of them has no name.
    """
    rows: list[dict[str, Any]] = []
    tracks: dict[tuple[int, int, int], int] = {}
    for event in read_events(profiler_buffer):
        if event.event >= len(event_names):
            raise ValueError(
                f"`event_names` must name event {event.event}, got {len(event_names)} names"
            )
        place = event.multiprocessor, event.block, event.group
        if place not in tracks:
            tracks[place] = len(tracks) + 1
            rows += _names(*place, tracks[place])
        row = {
            "name": event_names[event.event],
            "ph": _PHASES[event.kind],
            "ts": event.nanoseconds / 1000,
            "pid": event.multiprocessor,
            "tid": tracks[place],
        }
        rows.append(row | ({"s": "t"} if event.kind is EventType.kInstant else {}))
    with open(file_name, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": rows, "displayTimeUnit": "ns"}, file)


def _names(multiprocessor: int, block: int, group: int, track: int) -> list[dict[str, Any]]:
    """The rows that name a process and a thread."""
    names = (
        ("process_name", f"multiprocessor {multiprocessor}"),
        ("thread_name", f"block {block}, group {group}"),
    )
    return [
        {"name": kind, "ph": "M", "pid": multiprocessor, "tid": track, "args": {"name": name}}
        for kind, name in names
    ]
