"""Buffers of profiled kernels: what is read from them, what a kernel without profile costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from flashinfer.jit import nvrtc_compile, toolchain
from flashinfer.jit.binary import read_code, read_opcodes
from flashinfer.profiler import EventType, decode_tag, export_to_perfetto_trace
from flashinfer.profiler.events import read_events

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END, INSTANT = (kind.value for kind in EventType)
DRAWN = [("B", "keys", 1.0), ("B", "load", 2.0), ("E", "load", 3.0), ("E", "keys", 4.0)]
DRAWN += [("B", "keys", 5.0), ("E", "keys", 6.0)]

KERNEL = """
#include <flashinfer/profiler.cuh>
#ifdef PROFILED
using Profile = flashinfer::Profiler<PROFILED>;
#else
struct Profile {
  __device__ Profile(uint64_t*, uint32_t, uint32_t, uint32_t, bool) {}
  __device__ void begin(uint32_t) {}
  __device__ void end(uint32_t) {}
  __device__ void instant(uint32_t) {}
};
#endif
extern "C" __global__ void sums(const float* in, float* out, uint64_t* words, uint32_t capacity) {
  Profile profile(words, capacity, threadIdx.x / 32, blockDim.x / 32, threadIdx.x % 32 == 0);
  profile.begin(0);
  float sum = 0.f;
  for (int i = 0; i < 64; ++i) {
    if (i == 32) profile.instant(1);
    sum += in[(blockIdx.x * 64 + i) * blockDim.x + threadIdx.x];
  }
  profile.end(0);
  profile.begin(2);
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  profile.end(2);
}
"""


def word(kind: int, event: int, place: int, sm: int, nanoseconds: int) -> int:
    tag = kind | event << 2 | place << 12 | sm << 24
    value = tag | (nanoseconds % (1 << 32)) << 32
    return value - (1 << 64) if value >= 1 << 63 else value


def buffer(num_blocks: int, num_groups: int, *words: int) -> torch.Tensor:
    return torch.tensor([num_blocks | num_groups << 32, *words, 0, 0], dtype=torch.int64)


def test_tags():
    tag = INSTANT | 1023 << 2 | 4095 << 12 | 131 << 24
    assert decode_tag(tag, 1365, 3) == (1365, 0, 1023, INSTANT, 131)
    assert decode_tag(BEGIN | 5 << 2 | 7 << 12, 4, 2) == (3, 1, 5, BEGIN, 0)


def test_times_wrap_and_count_from_the_first():
    near_the_end = (1 << 32) - 10
    found = read_events(
        buffer(
            1,
            2,
            word(BEGIN, 0, 0, 5, near_the_end),
            word(BEGIN, 1, 1, 5, near_the_end - 30),
            word(END, 0, 0, 5, near_the_end + 25),
            word(END, 1, 1, 5, near_the_end + 5),
        ).view(torch.uint64)
    )
    assert [event.nanoseconds for event in found] == [0, 30, 35, 55]
    assert [event.group for event in found] == [1, 0, 1, 0]
    assert {event.multiprocessor for event in found} == {5}


def test_a_trace_file(tmp_path: Path):
    words = (
        word(BEGIN, 0, 0, 3, 1000),
        word(BEGIN, 1, 1, 4, 1500),
        word(END, 0, 0, 3, 3000),
        word(INSTANT, 1, 1, 4, 2500),
        word(END, 1, 1, 4, 4000),
    )
    export_to_perfetto_trace(buffer(2, 1, *words), ["load", "sum"], str(tmp_path / "trace.json"))
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    events = [(r["name"], r["ph"], r["ts"], r["pid"]) for r in rows if r["ph"] != "M"]
    assert events == [
        ("load", "B", 0.0, 3),
        ("sum", "B", 0.5, 4),
        ("sum", "i", 1.5, 4),
        ("load", "E", 2.0, 3),
        ("sum", "E", 3.0, 4),
    ]
    names = [r["args"]["name"] for r in rows if r["ph"] == "M"]
    assert names == [
        "multiprocessor 3",
        "block 0, group 0",
        "multiprocessor 4",
        "block 1, group 0",
    ]


@pytest.mark.parametrize(
    "given, error, message",
    [
        (None, TypeError, "`profiler_buffer` must be a torch.Tensor"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, "`profiler_buffer`"),
        (torch.zeros(2), ValueError, "must be uint64, got torch.float32"),
        (torch.zeros(0, dtype=torch.int64), ValueError, "must hold a launch"),
        (torch.zeros(4, dtype=torch.int64), ValueError, "must hold a launch"),
        (buffer(1, 1, word(3, 0, 0, 0, 9)), ValueError, "must hold events, got the word 0x9"),
        (buffer(1, 1, word(BEGIN, 1, 0, 0, 9)), ValueError, "`event_names` must name event 1"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, given, error, message: str):
    with pytest.raises(error, match=message):
        export_to_perfetto_trace(given, ["only"], str(tmp_path / "trace.json"))
    assert not (tmp_path / "trace.json").exists()


def test_a_block_is_drawn(tmp_path: Path):
    rows = [
        {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "block 3, group 0"}},
        {"ph": "M", "name": "thread_name", "tid": 2, "args": {"name": "block 30, group 0"}},
        *({"ph": ph, "name": name, "tid": 1, "ts": ts} for ph, name, ts in DRAWN),
        {"ph": "B", "name": "other", "tid": 2, "ts": 0.0},
    ]
    trace, out = tmp_path / "trace.json", tmp_path / "out.svg"
    trace.write_text(json.dumps({"traceEvents": rows}))
    command = [sys.executable, str(ROOT / "benchmarks" / "draw_profile.py"), str(trace), str(out)]
    assert subprocess.run([*command, "--block", "4"], capture_output=True).returncode == 2
    (tmp_path / "text").write_text("{}")
    for wrong in ("missing", "text"):
        words = [*command[:2], str(tmp_path / wrong), str(out)]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 2 and f"{wrong} is no trace file" in done.stderr
    subprocess.run([*command, "--block", "3"], check=True)
    drawn = out.read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("}svg")
    assert drawn.count('fill="#') == 2 + 3, "two names, three events"
    assert "prefers-color-scheme: dark" in drawn and "other" not in drawn


def compiled(folder: Path, name: str, *flags: str) -> Path:
    """The kernel above for sm_90a."""
    (folder / "kernel.cu").write_text(KERNEL)
    target = folder / f"{name}.cubin"
    words = ["-cubin", "-arch=sm_90a", "-std=c++17", f"-I{ROOT / 'include'}", *flags]
    nvcc = toolchain.require_toolkit().nvcc
    command = [nvcc, *words, "-o", target, folder / "kernel.cu"]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    return target


def code(path: Path) -> bytes:
    """Machine code of the kernel; a bare cubin has no container around it."""
    wrapped = path.with_suffix(".so")
    wrapped.write_bytes(nvrtc_compile.container({"90a": path.read_bytes()}))
    assert len(read_opcodes(wrapped)) == 1
    (found,) = read_code(wrapped).values()
    return found


@pytest.mark.compiler
def test_a_profile_that_is_off_has_no_instructions(tmp_path: Path):
    without = code(compiled(tmp_path, "without"))
    assert code(compiled(tmp_path, "off", "-DPROFILED=false")) == without
    assert code(compiled(tmp_path, "on", "-DPROFILED=true")) != without
