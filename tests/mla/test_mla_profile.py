"""Profiles of MLA: who waits for what, and results that they do not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.mla import PROFILE_EVENTS
from flashinfer.profiler.events import read_events
from tests.mla.batches import Batch, make_wrapper

LOAD, KEYS, WEIGHTS, VALUES, OUTPUT = range(len(PROFILE_EVENTS))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("page_size", [64, 5])
def test_every_tile_is_recorded(backend: str, page_size: int, device: torch.device, tmp_path: Path):
    batch = Batch((1, 3, 1), (1000, 130, 0), 16, page_size=page_size)
    arguments = batch.arguments(device)
    wrapper = make_wrapper(device, backend=backend)
    batch.plan(wrapper)
    usual = wrapper.run(**arguments)
    batch.plan(wrapper, use_profiler=True)
    words = torch.zeros(1 << 20, dtype=torch.uint64, device=device)
    assert torch.equal(wrapper.run(**arguments, profiler_buffer=words), usual)

    tracks: dict[tuple[int, int], list] = {}
    for event in read_events(words):
        tracks.setdefault((event.block, event.group), []).append(event)
    assert {group for _, group in tracks} == ({0, 1, 2} if backend == "fa3" else {0})
    counts = [0] * len(PROFILE_EVENTS)
    for events in tracks.values():
        open_events: list[int] = []
        for event in events:
            if event.kind.name == "kBegin":
                open_events.append(event.event)
                counts[event.event] += 1
            else:
                assert open_events.pop() == event.event
        assert not open_events
    # Blocks of 64 tokens, 16 of the first request and 3 of the second; more if a request is split
    # within one. On Hopper two warpgroups have half of the values each.
    assert counts[KEYS] >= 19 and counts[WEIGHTS] == counts[LOAD] == counts[KEYS]
    assert counts[VALUES] == counts[KEYS] * (2 if backend == "fa3" else 1)
    assert counts[OUTPUT] >= 3
    flashinfer.profiler.export_to_perfetto_trace(
        words, list(PROFILE_EVENTS), str(tmp_path / "trace.json")
    )
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {row["name"] for row in rows if row["ph"] == "B"} == set(PROFILE_EVENTS)


@pytest.mark.gpu
def test_a_full_buffer_drops_events(device: torch.device):
    batch = Batch((1,), (500,), 16)
    wrapper = make_wrapper(device)
    batch.plan(wrapper, use_profiler=True)
    words = torch.zeros(3, dtype=torch.int64, device=device)
    guard = torch.cat([words, torch.full((1000,), -7, device=device)])
    wrapper.run(**batch.arguments(device), profiler_buffer=guard[:3])
    assert (guard[3:] == -7).all()


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (None, TypeError),
        (torch.zeros(4), ValueError),
        (torch.zeros(0, dtype=torch.int64), ValueError),
        ("strided", ValueError),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError),
    ],
)
def test_buffers_that_are_refused(buffer: Any, error: type[Exception], device: torch.device):
    batch = Batch((1,), (50,), 16)
    wrapper = make_wrapper(device)
    batch.plan(wrapper, use_profiler=True)
    if isinstance(buffer, torch.Tensor):
        buffer = buffer.to(device)
    elif buffer == "strided":  # moved to the device, it would be dense
        buffer = torch.zeros(8, dtype=torch.int64, device=device)[::2]
    with pytest.raises(error, match="`profiler_buffer`"):
        wrapper.run(**batch.arguments(device), profiler_buffer=buffer)


def test_a_buffer_without_a_profile_is_refused(device: torch.device):
    batch = Batch((1,), (50,), 16)
    wrapper = make_wrapper(device)
    batch.plan(wrapper)
    words = torch.zeros(64, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="`profiler_buffer`"):
        wrapper.run(**batch.arguments(device), profiler_buffer=words)
