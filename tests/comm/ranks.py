"""Ranks as threads of one process, each with a GPU and a stream; several may share a GPU.

A kernel that waits for another rank must not keep that rank's kernel from starting. On a GPU that
ranks share much can: CUDA loads a kernel or allocates memory only when running kernels have ended;
while one thread copies to pageable memory, which waits for its kernel, other threads' launches wait
for the copy; the next kernel of a stream stands in a hardware queue that two streams share. A
process and a GPU for each rank, as in use, know none of that. So here nothing happens between the
first rank's launch of a call and the last one's: every launch goes through `together`. Results are
compared on the CPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashinfer.comm.comm_backend import ThreadBackend
from flashinfer.comm.peer_workspace import PeerWorkspace

TIMEOUT = 10.0  # seconds for which kernels wait

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
# Numbers of ranks, up to 8, that have a GPU each beyond two.
MORE_GPUS = tuple(range(3, min(torch.cuda.device_count(), 8) + 1))


def ranks_of_tests(*shared: int) -> list[int]:
    """These numbers of ranks, which may share GPUs, and what has a GPU for each rank."""
    return sorted({*shared, *MORE_GPUS})


class Meeting:
    """What ranks do around the launch of a call, in the runs of one test."""

    def __init__(self, world_size: int, freely: bool) -> None:
        """`freely`: calls may overlap the calls before, once everything is loaded."""
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.freely = freely
        self.alone = world_size <= torch.cuda.device_count()  # a GPU for each rank


_meeting: Meeting | None = None


def together(start: Callable[[], Any]) -> Any:
    """Start kernels that wait for other ranks; all ranks call it, and return when all have."""
    meeting = _meeting
    if meeting is None or torch.cuda.is_current_stream_capturing():
        return start()
    if not meeting.freely:
        torch.cuda.current_stream().synchronize()
        meeting.barrier.wait()
    result = start()
    if not (meeting.freely and meeting.alone):
        meeting.barrier.wait()
    return result


def run_ranks(
    world_size: int,
    body: Callable[[ThreadBackend], Any],
    *,
    freely: bool = False,
    first: Callable[[ThreadBackend], Any] | None = None,
) -> list[Any]:
    """What ``body(backend)`` returns on each rank; the first error is raised.

    Each call begins when the calls before have ended. With `freely`, a second run follows in which
    they may overlap: its calls must find their tensors made and their data on the GPU. `first`
    stands for `body` in the first run.
    """
    streams = [torch.cuda.Stream(rank % torch.cuda.device_count()) for rank in range(world_size)]
    results = _run(streams, first or body, freely=False)
    return _run(streams, body, freely=True) if freely else results


@contextlib.contextmanager
def _launches_meet(meeting: Meeting) -> Iterator[None]:
    global _meeting
    launch = PeerWorkspace.launch
    PeerWorkspace.launch = lambda *args: together(lambda: launch(*args))  # type: ignore
    _meeting = meeting
    try:
        yield
    finally:
        _meeting = None
        PeerWorkspace.launch = launch  # type: ignore[method-assign]


def _run(
    streams: list[torch.cuda.Stream], body: Callable[[ThreadBackend], Any], freely: bool
) -> list[Any]:
    world_size = len(streams)
    backends = ThreadBackend.create(world_size, timeout=60)
    meeting = Meeting(world_size, freely)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            torch.cuda.set_device(rank % torch.cuda.device_count())
            with torch.cuda.stream(streams[rank]):
                results[rank] = body(backends[rank])
                torch.cuda.current_stream().synchronize()
        except threading.BrokenBarrierError:
            pass  # another rank has the reason
        except BaseException as error:
            errors.append(error)
            backends[rank].abort()
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    with _launches_meet(meeting):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    if meeting.barrier.broken:
        raise RuntimeError("a rank made another number of calls, or took over 60 s")
    return results


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal random numbers on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def rank_sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32 in the order of the ranks, rounded once."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes on the CPU."""
    return tensor.cpu().contiguous().view(torch.uint8)
