"""The three clocks that the public functions of ``timing`` use."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from .cupti_trace import CuptiUnavailableError, load_cupti, record
from .tensors import clone_arguments, copies_to_exceed, storage_bytes

__all__ = [
    "Request",
    "checked_request",
    "l2_cache_bytes",
    "sleep_after_kernel_run",
    "time_and_clock",
]

_ESTIMATION_ITERS = 5
# A span that reads zero would ask for infinitely many iterations.
_SHORTEST_MS = 1e-3
# A median does not get better beyond this, and each cold call costs a flush that the budget does
# not count.
_MAX_ITERS = 1000
# Copies of the arguments in one graph. Tiny arguments would need more to exceed the cache;
# capture time forbids it.
_MAX_COPIES = 4096
_Result = TypeVar("_Result")
_Call = Callable[[], object]


def sleep_after_kernel_run(execution_time: float) -> None:
    """Let the device cool down: sleep five times as long as the kernel ran, between 10 ms and 1 s.

    Parameters
    ----------
    execution_time : float
        Milliseconds. Infinite or NaN sleeps for the whole second.
    """
    seconds = 5e-3 * execution_time if math.isfinite(execution_time) else 1.0
    time.sleep(min(max(seconds, 0.01), 1.0))


def l2_cache_bytes(device: torch.device | int | str | None = None) -> int:
    """Size of the device's L2 cache in bytes, as the driver reports it."""
    device = torch.cuda.current_device() if device is None else device
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _require_gpu(who: str) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(f"{who} needs a CUDA device, and PyTorch finds none")


_warned: set[str] = set()


def _warn_once(subject: str, message: str) -> None:
    """Warn the first time something is said about ``subject``."""
    if subject not in _warned:
        _warned.add(subject)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


@dataclasses.dataclass
class Request:
    """Arguments of the four public functions, with aliases resolved and values checked."""

    fn: Callable[..., Any]
    dry_run_iters: int | None
    repeat_iters: int | None
    dry_run_time_ms: float
    repeat_time_ms: float
    cold_l2: bool
    flush_bytes: int | None
    flush_device: torch.device
    sleep_after_run: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    aggregate_op: Callable[[Sequence[float]], float]

    def call(self) -> None:
        self.fn(*self.args, **self.kwargs)

    @functools.cached_property
    def flush(self) -> _Call:
        """Writes a buffer twice the L2 cache; does nothing when a warm cache is wanted."""
        if not self.cold_l2:
            return lambda: None
        nbytes = self.flush_bytes or 2 * l2_cache_bytes(self.flush_device)
        return torch.empty(nbytes, dtype=torch.int8, device=self.flush_device).zero_

    def iterations(self, estimate_ms: float) -> tuple[int, int]:
        """Dry runs and repeats: as asked for, else to fill the asked time. Equal on all ranks."""
        each = max(_across_ranks([estimate_ms], self.aggregate_op)[0], _SHORTEST_MS)

        def count(given: int | None, budget_ms: float) -> int:
            return min(max(1, math.ceil(budget_ms / each)), _MAX_ITERS) if given is None else given

        dry_runs = count(self.dry_run_iters, self.dry_run_time_ms)
        return dry_runs, count(self.repeat_iters, self.repeat_time_ms)


def _first_given(
    name: str, value: _Result | None, alias: str, other: _Result | None
) -> _Result | None:
    if value is not None and other is not None:
        raise TypeError(f"{alias} is another name of {name}: give one of them")
    return value if other is None else other


def checked_request(
    who: str,
    fn: Callable[..., Any],
    options: dict[str, Any],
) -> Request:
    """Check the arguments shared by the public functions. ``options`` holds them by name."""
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}")
    repeat = _first_given(
        "repeat_iters", options["repeat_iters"], "num_iters", options["num_iters"]
    )
    args = _first_given("input_args", options["input_args"] or None, "args", options["args"])
    for name, value, least in (
        ("dry_run_iters", options["dry_run_iters"], 0),
        ("repeat_iters", repeat, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    for name in ("dry_run_time_ms", "repeat_time_ms"):
        if not options[name] > 0:
            raise ValueError(f"{name} must be positive, got {options[name]}")
    megabytes = options["l2_flush_size_mb"]
    if megabytes is not None and megabytes <= 0:
        raise ValueError(f"l2_flush_size_mb must be positive, got {megabytes}")
    cold = options["cold_l2_cache"]
    if options["l2_flush"] is not None:
        warnings.warn("l2_flush is now called cold_l2_cache", DeprecationWarning, stacklevel=3)
        cold = options["l2_flush"]
    _require_gpu(who)
    return Request(
        fn=fn,
        dry_run_iters=options["dry_run_iters"],
        repeat_iters=repeat,
        dry_run_time_ms=options["dry_run_time_ms"],
        repeat_time_ms=options["repeat_time_ms"],
        cold_l2=bool(cold),
        flush_bytes=None if megabytes is None else int(megabytes) << 20,
        flush_device=torch.device(options["l2_flush_device"] or "cuda"),
        sleep_after_run=options["sleep_after_run"],
        args=tuple(args or ()),
        kwargs=dict(options["input_kwargs"] or {}),
        aggregate_op=options["aggregate_op"],
    )


def _across_ranks(
    values: list[float], aggregate_op: Callable[[Sequence[float]], float]
) -> list[float]:
    """Combine the ranks' values position by position; the values themselves in a single process."""
    ranks = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
    if ranks == 1:
        return values
    gathered: list[list[float]] = [[] for _ in range(ranks)]
    torch.distributed.all_gather_object(gathered, values)
    return [float(aggregate_op(position)) for position in zip(*gathered, strict=True)]


def _event_times(run: _Call, before: _Call, n: int, sleep: bool) -> list[float]:
    """Milliseconds of each of ``n`` runs; ``before`` runs before each, outside the timed span."""
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(n)
    ]
    for start, end in pairs:
        before()
        start.record()
        run()
        end.record()
        if sleep:
            end.synchronize()
            sleep_after_kernel_run(start.elapsed_time(end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _estimate_ms(request: Request, run: _Call) -> float:
    """Mean time of a call, after one that pays for compilation and module loading."""
    run()
    torch.cuda.synchronize()
    return float(np.mean(_event_times(run, request.flush, _ESTIMATION_ITERS, sleep=False)))


def _capture(calls: Sequence[_Call]) -> torch.cuda.CUDAGraph:
    """One graph that makes all the calls, in order."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()  # lazy initialisation must not happen under capture
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _with_events(request: Request) -> list[float]:
    """Milliseconds per call, each between two events."""
    dry, repeat = request.iterations(_estimate_ms(request, request.call))
    for _ in range(dry):
        request.flush()
        request.call()
    times = _event_times(request.call, request.flush, repeat, request.sleep_after_run)
    return _across_ranks(times, request.aggregate_op)


def _rotated_calls(request: Request, num_iters_within_graph: int) -> tuple[list[_Call], _Call]:
    """The calls of one graph, and what to do before each replay."""
    if not request.cold_l2:
        return [request.call] * num_iters_within_graph, lambda: None
    per_call = storage_bytes((request.args, request.kwargs))
    if per_call == 0:
        _warn_once(
            "nothing to rotate",
            "no tensor in input_args or input_kwargs to rotate: the graph holds one call, the L2 "
            "cache is flushed before each replay, and the times include the launch of the graph "
            "(pass tensors as arguments to avoid this)",
        )
        return [request.call], request.flush
    # A call must not find what was touched since its last turn: all copies together exceed the
    # cache twice over.
    wanted = request.flush_bytes or 2 * l2_cache_bytes(request.flush_device)
    copies = copies_to_exceed(per_call, wanted + 1, limit=_MAX_COPIES)
    if copies * per_call <= wanted:
        _warn_once(
            "too small to rotate",
            f"arguments of {per_call} bytes: {copies} copies may stay in the L2 cache, so the "
            "times are between cold and warm (CUPTI measures them cold)",
        )
    sets = [(request.args, request.kwargs)]
    sets += [clone_arguments(sets[0], where=lambda t: t.is_cuda) for _ in range(copies - 1)]
    num_calls = num_iters_within_graph * math.ceil(copies / num_iters_within_graph)
    chosen = [sets[i % copies] for i in range(num_calls)]
    return [functools.partial(request.fn, *args, **kwargs) for args, kwargs in chosen], lambda: None


def _with_graph(request: Request, num_iters_within_graph: int) -> list[float]:
    """Milliseconds per call, one mean per replay of a graph of calls."""
    if num_iters_within_graph < 1:
        raise ValueError(f"num_iters_within_graph must be at least 1, got {num_iters_within_graph}")
    request.call()
    torch.cuda.synchronize()
    calls, before = _rotated_calls(request, num_iters_within_graph)
    graph = _capture(calls)
    estimate = float(np.mean(_event_times(graph.replay, before, _ESTIMATION_ITERS, sleep=False)))
    dry, repeat = request.iterations(estimate)
    for _ in range(dry):
        before()
        graph.replay()
    times = _event_times(graph.replay, before, repeat, request.sleep_after_run)
    return _across_ranks([t / len(calls) for t in times], request.aggregate_op)


def _with_cupti(request: Request, cupti: Any, use_cuda_graph: bool) -> list[float]:
    """Milliseconds per call, from the first start to the last end of its kernels."""
    request.call()  # compiles and loads before anything is recorded
    torch.cuda.synchronize()
    windows: list[tuple[int, int]] = []
    with record(cupti, torch.cuda.synchronize) as trace:
        # A graph is captured under the recording, so that CUPTI knows its kernels.
        run: _Call = _capture([request.call]).replay if use_cuda_graph else request.call
        dry, repeat = request.iterations(_estimate_ms(request, run))
        for i in range(dry + repeat):
            request.flush()
            begin = cupti.get_timestamp()
            run()
            window = (begin, cupti.get_timestamp())
            if i < dry:
                continue
            windows.append(window)
            if request.sleep_after_run:
                torch.cuda.synchronize()
                sleep_after_kernel_run((cupti.get_timestamp() - begin) / 1e6)
    return _across_ranks(trace.spans_ms(windows), request.aggregate_op)


def time_and_clock(
    request: Request, *, cupti: bool, graph: bool, num_iters_within_graph: int = 10
) -> tuple[list[float], str]:
    """Time with the asked clock, or the next best where CUPTI cannot be used (one warning).

    Returns
    -------
    list of float
        Milliseconds per call.
    str
        The clock that was used: ``"cupti"``, ``"cuda_graph"`` or ``"cuda_events"``.
    """
    if cupti:
        try:
            return _with_cupti(request, load_cupti(), graph), "cupti"
        except CuptiUnavailableError as error:
            instead = "graphs" if graph else "events"
            _warn_once("cupti", f"falling back from CUPTI to CUDA {instead}: {error}")
    if graph:
        return _with_graph(request, num_iters_within_graph), "cuda_graph"
    return _with_events(request), "cuda_events"
