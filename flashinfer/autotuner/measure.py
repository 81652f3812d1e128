"""How long a candidate takes on the GPU.

A call is recorded into a CUDA graph, so that its launches cost little, and replayed after a buffer
of the size of the L2 cache was written: in a server, other layers ran since a layer's weights were
last read. A sample is the time between two events around the replays; the write before them (a
pause, where the cache may be warm) keeps the GPU busy while the host launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Call = Callable[[], object]
Timer = Callable[[Call, int, int], list[float]]
"""``timer(call, samples, replays)``: milliseconds of each sample's average call."""


_DELAY = 100_000  # clock cycles, about 50 us: what the host needs to launch a few kernels


@dataclass(frozen=True)
class MeasurementPolicy:
    """How candidates are timed.

    Parameters
    ----------
    execution_mode : {"auto", "cuda_graph", "eager"}
        A CUDA graph, or launches from the host; ``"auto"`` records a graph and launches from the
        host what cannot be recorded.
    cold_l2 : bool, optional
        Whether a candidate finds nothing of its inputs in the L2 cache; None is True.
    _timer : {"auto", "cuda_event"}
        The clock; both are CUDA events.
    """

    execution_mode: Literal["auto", "cuda_graph", "eager"] = "auto"
    cold_l2: bool | None = None
    _timer: str = "auto"

    def __post_init__(self) -> None:
        modes = ("auto", "cuda_graph", "eager")
        if self.execution_mode not in modes:
            raise ValueError(f"`execution_mode` must be one of {modes}, got {self.execution_mode}")
        if self.cold_l2 not in (None, True, False):
            raise ValueError(f"`cold_l2` must be True, False or None, got {self.cold_l2}")
        if self._timer not in ("auto", "cuda_event"):
            raise ValueError(f"`_timer` must be 'auto' or 'cuda_event', got {self._timer!r}")

    def manifest_fields(self) -> dict[str, str]:
        """The settings that are in force, by name."""
        return {
            "execution_mode": self.execution_mode,
            "cold_l2": str(self.cold_l2 is not False),
            "timer": "cuda_event",
        }


def cuda_timer(policy: MeasurementPolicy) -> Timer:
    """The timer of the current GPU; it keeps one buffer of the size of its L2 cache."""
    flush = None
    if policy.cold_l2 is not False:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        flush = torch.empty(int(properties.L2_cache_size), dtype=torch.uint8, device="cuda")

    def measure(call: Call, samples: int, replays: int) -> list[float]:
        run = _recorded(call, policy.execution_mode)
        pairs = []
        for _ in range(samples):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if flush is not None:
                flush.zero_()
            else:
                torch.cuda._sleep(_DELAY)
            begin.record()
            for _ in range(replays):
                run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.current_stream().synchronize()
        return [begin.elapsed_time(end) / replays for begin, end in pairs]

    return measure


def _recorded(call: Call, mode: str) -> Call:
    """`call` as one launch of a CUDA graph; `call` runs once before it is recorded."""
    call()
    if mode == "eager":
        return call
    graph = torch.cuda.CUDAGraph()
    try:
        torch.cuda.current_stream().synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError:
        if mode == "cuda_graph":
            raise
        return call
    graph.replay()
    return graph.replay
