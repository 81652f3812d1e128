"""GPU time of a call: through CUPTI, CUDA graphs or CUDA events, with a cold L2 cache by default.

Three clocks, best first:

* CUPTI reads the start and end of each kernel from the device: no launch overhead, no gap before
  the first kernel.
* A CUDA graph holds several calls and is timed as a whole: launch gaps shrink to what the hardware
  needs.
* Events around each call include what the host needs to launch, unless the device is busy meanwhile
  (the L2 flush before each call keeps it busy for longer than a launch takes).

Cold L2: with events and CUPTI a buffer larger than the cache is written before each call, outside
the timed span. Inside a graph that would be timed as well; instead the graph's calls rotate over
copies of the arguments that together exceed twice the cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .timers import checked_request, sleep_after_kernel_run, time_and_clock

__all__ = [
    "bench_gpu_time",
    "bench_gpu_time_with_cuda_event",
    "bench_gpu_time_with_cudagraph",
    "bench_gpu_time_with_cupti",
    "set_seed",
    "sleep_after_kernel_run",
]


def set_seed(random_seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators, on all devices; creates no CUDA context."""
    random.seed(random_seed)
    np.random.seed(random_seed % 2**32)
    torch.manual_seed(random_seed)


def bench_gpu_time_with_cuda_event(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: bool | None = None,
    l2_flush_size_mb: int | None = None,
    l2_flush_device: str | None = None,
    sleep_after_run: bool = False,
    input_args: tuple[Any, ...] = (),
    input_kwargs: dict[str, Any] | None = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[[Sequence[float]], float] = max,
    *,
    args: tuple[Any, ...] | None = None,
    num_iters: int | None = None,
) -> list[float]:
    """Time ``fn`` with a pair of CUDA events around each call.

    Parameters are those of :func:`bench_gpu_time`. With a warm cache, a kernel that is shorter
    than its launch shows the launch: use a graph or CUPTI there.

    Returns
    -------
    list of float
        Milliseconds, one per call.
    """
    request = checked_request("bench_gpu_time_with_cuda_event", fn, locals())
    return time_and_clock(request, cupti=False, graph=False)[0]


def bench_gpu_time_with_cudagraph(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    num_iters_within_graph: int = 10,
    l2_flush: bool | None = None,
    l2_flush_size_mb: int | None = None,
    l2_flush_device: str | None = None,
    sleep_after_run: bool = False,
    input_args: tuple[Any, ...] = (),
    input_kwargs: dict[str, Any] | None = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[[Sequence[float]], float] = max,
    *,
    args: tuple[Any, ...] | None = None,
    num_iters: int | None = None,
) -> list[float]:
    """Time replays of a CUDA graph that calls ``fn`` several times.

    Parameters are those of :func:`bench_gpu_time`, and ``num_iters_within_graph``: the graph
    holds a multiple of it, as many calls as it takes to visit every copy of the arguments. Only
    tensors that are passed as arguments can be rotated; without one, the graph holds a single
    call and the cache is flushed before each replay (a warning says so).

    Returns
    -------
    list of float
        Milliseconds of one call (a replay's time divided by its calls), one entry per replay.
    """
    request = checked_request("bench_gpu_time_with_cudagraph", fn, locals())
    return time_and_clock(
        request, cupti=False, graph=True, num_iters_within_graph=num_iters_within_graph
    )[0]


def bench_gpu_time_with_cupti(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: bool | None = None,
    l2_flush_size_mb: int | None = None,
    l2_flush_device: str | None = None,
    sleep_after_run: bool = False,
    use_cuda_graph: bool = False,
    input_args: tuple[Any, ...] = (),
    input_kwargs: dict[str, Any] | None = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[[Sequence[float]], float] = max,
    *,
    args: tuple[Any, ...] | None = None,
    num_iters: int | None = None,
) -> list[float]:
    """Time the kernels of ``fn`` with the device's own time stamps, through CUPTI.

    Parameters are those of :func:`bench_gpu_time`; ``use_cuda_graph`` replays a captured call
    instead of calling ``fn``. Needs the package ``cupti-python`` (13 or later). Where CUPTI
    cannot be used, one warning is given and the time is taken with a CUDA graph (if
    ``use_cuda_graph``) or events.

    Returns
    -------
    list of float
        Milliseconds from the start of the call's first kernel (copy, fill) to the end of its
        last, one per call.
    """
    request = checked_request("bench_gpu_time_with_cupti", fn, locals())
    return time_and_clock(request, cupti=True, graph=use_cuda_graph)[0]


def bench_gpu_time(
    fn: Callable[..., Any],
    dry_run_iters: int | None = None,
    repeat_iters: int | None = None,
    dry_run_time_ms: float = 25,
    repeat_time_ms: float = 100,
    l2_flush: bool | None = None,
    l2_flush_size_mb: int | None = None,
    l2_flush_device: str | None = None,
    sleep_after_run: bool = False,
    enable_cupti: bool = False,
    use_cuda_graph: bool = False,
    num_iters_within_graph: int = 10,
    input_args: tuple[Any, ...] = (),
    input_kwargs: dict[str, Any] | None = None,
    cold_l2_cache: bool = True,
    aggregate_op: Callable[[Sequence[float]], float] = max,
    *,
    args: tuple[Any, ...] | None = None,
    num_iters: int | None = None,
) -> list[float]:
    """Time ``fn`` on the GPU.

    Parameters
    ----------
    fn : Callable
        The function to time; called as ``fn(*input_args, **input_kwargs)`` on the current stream.
        It must do the same work every time, and be safe to repeat on the same tensors.
    dry_run_iters : int, optional
        Untimed calls; by default as many as take ``dry_run_time_ms``.
    repeat_iters : int, optional
        Timed calls (graph replays with a CUDA graph); by default as many as take
        ``repeat_time_ms``.
    dry_run_time_ms, repeat_time_ms : float
        Budgets in milliseconds for the counts that are not given.
    l2_flush : bool, optional
        Former name of ``cold_l2_cache``; deprecated.
    l2_flush_size_mb : int, optional
        Mebibytes to write (or to rotate over, in a graph) for a cold cache; twice the device's L2
        cache by default.
    l2_flush_device : str, optional
        Device whose cache is flushed; the current one by default.
    sleep_after_run : bool
        Pause after each timed call so that the device does not heat up (see
        :func:`sleep_after_kernel_run`).
    enable_cupti : bool
        Time with CUPTI, if it can be used here.
    use_cuda_graph : bool
        Time a CUDA graph of calls; together with ``enable_cupti``, replay a graph of one call
        under CUPTI.
    num_iters_within_graph : int
        Calls per graph; under CUPTI, where a graph holds one call, only for its fall back.
    input_args, input_kwargs : tuple, dict
        Arguments of ``fn``. A graph rotates over copies of the CUDA tensors among them, nested
        ones included.
    cold_l2_cache : bool
        Whether every call shall find nothing of its inputs in the L2 cache.
    aggregate_op : Callable
        When ``torch.distributed`` is initialised, every rank must make this call, and the ranks'
        times are combined with it, call by call: with ``max`` a collective is as slow as its
        slowest rank.
    args, num_iters : optional
        Other names of ``input_args`` and ``repeat_iters``.

    Returns
    -------
    list of float
        Milliseconds, one per timed call or replay. Take the median: ``statistics.median(times)``.

    Raises
    ------
    RuntimeError
        If there is no CUDA device.
    TypeError, ValueError
        If an argument is unusable; the message names it.

    Examples
    --------
    >>> import statistics
    >>> x = torch.randn(4096, 8192, device="cuda")
    >>> times = bench_gpu_time(torch.relu, input_args=(x,), enable_cupti=True)
    >>> microseconds = 1e3 * statistics.median(times)
    """
    request = checked_request("bench_gpu_time", fn, locals())
    return time_and_clock(
        request,
        cupti=enable_cupti,
        graph=use_cuda_graph,
        num_iters_within_graph=num_iters_within_graph,
    )[0]
