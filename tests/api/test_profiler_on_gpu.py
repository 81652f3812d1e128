"""A profiled kernel on a GPU: every warp's events, in their order."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from flashinfer._common import driver
from flashinfer.profiler import EventType
from flashinfer.profiler.events import read_events
from tests.unit.test_profiler import compiled

pytestmark = [pytest.mark.gpu, pytest.mark.compiler]

BLOCKS, THREADS = 3, 64
EXPECTED = [(0, "kBegin"), (1, "kInstant"), (0, "kEnd"), (2, "kBegin"), (2, "kEnd")]


@pytest.mark.parametrize("room", [5, 2])
def test_events_of_every_warp(tmp_path: Path, room: int):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    values = torch.arange(BLOCKS * 64 * THREADS, device="cuda", dtype=torch.float32)
    out = torch.empty(BLOCKS * THREADS, device="cuda")
    groups = BLOCKS * THREADS // 32
    words = torch.zeros(1 + room * groups, dtype=torch.int64, device="cuda")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    path = compiled(tmp_path, "on", "-DPROFILED=true")
    driver.call("cuModuleLoad", ctypes.byref(module), str(path).encode())
    driver.call("cuModuleGetFunction", ctypes.byref(function), module, b"sums")
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (values, out, words)]
    arguments = [*pointers, ctypes.c_uint(words.numel())]
    array = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(a) for a in arguments])
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    driver.call("cuLaunchKernel", function, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, array, None)
    torch.cuda.synchronize()
    assert torch.equal(out, values.view(BLOCKS, 64, THREADS).sum(1).flatten())
    tracks: dict[tuple[int, int], list] = {}
    for event in read_events(words):
        tracks.setdefault((event.block, event.group), []).append(event)
    assert set(tracks) == {(b, g) for b in range(BLOCKS) for g in range(THREADS // 32)}
    for events in tracks.values():
        found = [(event.event, event.kind.name) for event in events]
        assert found == EXPECTED[:room] and EventType[found[0][1]] is EventType.kBegin
        assert len({event.multiprocessor for event in events}) == 1
