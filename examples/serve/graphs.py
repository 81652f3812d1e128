"""Captured decode steps, and the tables that they read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .table import Table


@contextmanager
def garbage_kept() -> Iterator[None]:
    """No cycle of objects is collected meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _event_of_replays() -> torch.cuda.Event | None:
    """An event that each replay of a graph records again; None if PyTorch is too old for it."""
    try:
        return torch.cuda.Event(external=True)
    except TypeError:
        return None


@dataclass
class Graph:
    """A captured decode step for up to `capacity` requests, with the buffers it reads.

    A stream of the graph's own copies the next step's table and plans once the layers of the
    replay before have read theirs. The head's product and the draw, which read neither, hide
    the copies. Memory that a plan allocates there is safe: a graph reads what it was captured with.

    Attributes
    ----------
    table : Table
        On the device.
    wrappers : dict
        Wrapper of each `spec`; no other step uses them, and their plans write nothing else.
    starts : torch.Tensor
        ``[capacity + 1]`` int32, 0, 1, ..., on the host: first row of each request.
    graph : torch.cuda.CUDAGraph or None
        None before the capture.
    rows : torch.Tensor or None
        Logits, of each replay the same tensor.
    """

    capacity: int
    table: Table
    wrappers: dict[Any, Any]
    graph: Any = None
    rows: torch.Tensor | None = None

    def __post_init__(self) -> None:
        on_gpu = self.table.packed.is_cuda
        # Pinned, since plans copy it: copies from other memory wait for the stream.
        self.starts = torch.arange(self.capacity + 1, dtype=torch.int32, pin_memory=on_gpu)
        self._was_read = _event_of_replays() if on_gpu else None
        self._beside = torch.cuda.Stream(self.table.packed.device) if on_gpu else None

    def note_read(self) -> None:
        """Table and plans may be overwritten from here on: said by each run, replayed or not."""
        if self._was_read is not None:
            self._was_read.record()

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """Where a step's table and plans are copied. What follows on this stream comes after.

        Before the capture it is this stream: the first plan compiles, and counts the
        multiprocessors of the stream that will run it.
        """
        if self.graph is None or self._was_read is None or self._beside is None:
            yield
            return
        self._beside.wait_event(self._was_read)
        try:
            with torch.cuda.stream(self._beside):
                yield
        finally:  # also if a plan fails: whatever gets the graph's memory later comes after
            torch.cuda.current_stream().wait_stream(self._beside)

    def capture(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run `compute` once, whose result is returned, and capture it."""
        # The first run compiles what is missing, and its result is this step's. A capture only
        # records, so that the cache is written once.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            logits = compute()
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        # A capture ends in an error where other threads, or the collector that frees a former
        # graph, make calls that it forbids.
        with garbage_kept(), torch.cuda.graph(captured, capture_error_mode="thread_local"):
            self.rows = compute()
        self.graph = captured
        return logits

    def replay(self) -> torch.Tensor:
        """Logits of what lies in the buffers."""
        assert self.graph is not None and self.rows is not None
        self.graph.replay()
        return self.rows
