"""The GPU's clock between other work of a stream."""

from __future__ import annotations

import pytest
import torch

from flashinfer.jit import ToolchainError, global_timer
from flashinfer.utils import get_globaltimer_kernel


@pytest.mark.gpu
def test_times_grow_with_the_work_between(device: torch.device):
    stamp = get_globaltimer_kernel()
    assert stamp is not None
    times = torch.full((3, 1), -7, dtype=torch.int64, device=device)
    a = torch.randn(1024, 1024, dtype=torch.bfloat16, device=device)
    for _ in range(2):  # first for the loading of kernels
        stamp(times[0])
        torch.mm(a, a)
        stamp(times[1])
        for _ in range(50):
            torch.mm(a, a)
        stamp(times[2])
    first, second, third = times.flatten().tolist()
    assert 0 < second - first < third - second < 10**9


@pytest.mark.gpu
def test_agrees_with_events(device: torch.device):
    stamp = get_globaltimer_kernel()
    assert stamp is not None
    times = torch.zeros(2, dtype=torch.uint64, device=device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        for i in range(2):
            events[i].record()
            stamp(times[i : i + 1])
            for _ in range(0 if i else 100):
                torch.mm(a, a)
    torch.cuda.synchronize()
    begin, end = times.view(torch.int64).tolist()
    assert (end - begin) / 1e6 == pytest.approx(events[0].elapsed_time(events[1]), rel=0.05)


@pytest.mark.gpu
def test_a_graph_stamps_each_replay(device: torch.device):
    stamp = get_globaltimer_kernel()
    assert stamp is not None
    time = torch.zeros(1, dtype=torch.int64, device=device)
    stamp(time)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stamp(time)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(time.item())
    assert seen == sorted(set(seen))


@pytest.mark.compiler
@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),  # not on a GPU
    ],
    ids=["int32", "two", "no dimension", "CPU"],
)
def test_other_tensors_are_refused(out: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    stamp = get_globaltimer_kernel()
    assert stamp is not None
    with pytest.raises(ValueError, match="`out`"):
        stamp(out)


def test_there_is_none_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    def build() -> None:
        raise ToolchainError("nothing compiles here")

    monkeypatch.setattr("flashinfer.utils.get_global_timer", build)
    assert get_globaltimer_kernel() is None
    assert global_timer.gen_global_timer_module().name == "global_timer"
