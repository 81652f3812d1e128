"""Ranks that divide a model as threads of this process, on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from examples.serve.parallel import Parallel

T = TypeVar("T")
SECONDS = 120


@dataclass
class _Meeting:
    """Where the ranks put what they add."""

    ranks: int
    barrier: threading.Barrier = field(init=False)
    parts: list[torch.Tensor | None] = field(init=False)
    sums: int = 0

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=SECONDS)
        self.parts = [None] * self.ranks


class ThreadParallel(Parallel):
    """Adds in float32 in the order of the ranks, and rounds once, as the kernel does."""

    def __init__(self, meeting: _Meeting, rank: int, expert_parallel: bool) -> None:
        super().__init__(rank, meeting.ranks, expert_parallel)
        self.meeting = meeting

    def sum(self, x: torch.Tensor) -> None:
        meeting = self.meeting
        meeting.parts[self.rank] = x.float()
        meeting.barrier.wait()
        total = torch.stack([part for part in meeting.parts if part is not None]).sum(0)
        meeting.sums += self.rank == 0
        meeting.barrier.wait()  # nobody writes before all have read
        x.copy_(total)


def on_ranks(
    ranks: int, work: Callable[[ThreadParallel], T], expert_parallel: bool = False
) -> list[T]:
    """Results of all ranks, each in a thread; the first one's exception."""
    meeting = _Meeting(ranks)

    def run(rank: int) -> T:
        try:
            return work(ThreadParallel(meeting, rank, expert_parallel))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # A rank that only waited for another says nothing.
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
