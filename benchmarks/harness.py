"""Runs one case: inputs, reference check, time, row."""

from __future__ import annotations

import functools
import statistics
import traceback
from argparse import Namespace
from collections.abc import Callable
from typing import Any, Protocol

import torch
from report import Row
from routines import Backend, Routine

import flashinfer
from flashinfer.testing import CheckOptions, check_against, copy_bandwidth_tb_per_sec, set_seed
from flashinfer.testing.reference import template_of
from flashinfer.testing.roofline import percent, tb_per_sec, tflops_per_sec
from flashinfer.testing.timers import checked_request, time_and_clock


class Timer(Protocol):
    """The clock of measurements; tests put a simulated one here."""

    device: str

    def device_name(self) -> str: ...

    def copy_tb_per_sec(self) -> float: ...

    def time(
        self, function: Callable[..., Any], arguments: dict[str, Any], case: Namespace
    ) -> tuple[list[float], str]: ...


class GpuTimer:
    """Measures on the current CUDA device."""

    device = "cuda"

    def device_name(self) -> str:
        """Name of the device, as the driver gives it."""
        return torch.cuda.get_device_name()

    def copy_tb_per_sec(self) -> float:
        """Measured copy bandwidth, the ceiling of what streams through memory."""
        return copy_bandwidth_tb_per_sec()

    def time(
        self, function: Callable[..., Any], arguments: dict[str, Any], case: Namespace
    ) -> tuple[list[float], str]:
        """Milliseconds per call and the clock that measured them, as the flags of ``case`` ask."""
        options: dict[str, Any] = dict.fromkeys(
            ("num_iters", "args", "l2_flush", "l2_flush_size_mb", "l2_flush_device")
        )
        options |= dict(dry_run_time_ms=25, repeat_time_ms=100, sleep_after_run=False)
        options |= dict(aggregate_op=max, input_args=(), input_kwargs=arguments)
        options |= dict(dry_run_iters=case.dry_run_iters, repeat_iters=case.num_iters)
        request = checked_request(
            "the benchmark", function, options | dict(cold_l2_cache=not case.warm_l2)
        )
        return time_and_clock(request, cupti=not case.use_cuda_events, graph=not case.no_cuda_graph)


def _check(routine: Routine, backend: Backend, arguments: dict[str, Any]) -> None:
    """Raise AssertionError unless the backend computes what the reference does."""
    api = Backend(routine.api).resolve()
    taken = backend.arguments(arguments)
    template = template_of(api, taken)
    if routine.check_options:
        options = routine.check_options(template, taken)
    else:
        options = CheckOptions(roundings=backend.roundings)
    check_against(backend.resolve(), template, taken, options)


def _measured(routine: Routine, backend: Backend, case: Namespace, timer: Timer) -> Row:
    set_seed(case.random_seed)
    if not routine.captures:
        case = Namespace(**{**vars(case), "no_cuda_graph": True})
    arguments = routine.build(case, timer.device)
    if case.refcheck:
        _check(routine, backend, arguments)
    times, clock = timer.time(backend.resolve(), backend.arguments(arguments), case)
    median = statistics.median(times)
    nbytes, copy = routine.nbytes(arguments), timer.copy_tb_per_sec()
    flops = routine.flops(case) if routine.flops else None
    rate = tb_per_sec(nbytes, median)
    return dict(
        status="ok",
        median_us=1e3 * median,
        std_us=1e3 * statistics.pstdev(times),
        min_us=1e3 * min(times),
        tb_per_sec=rate,
        percent_of_copy=percent(rate, copy),
        tflops_per_sec=tflops_per_sec(flops, median) if flops else None,
        bytes=nbytes,
        flops=flops,
        clock=clock,
        num_iters=len(times),
        copy_tb_per_sec=copy,
    )


def run_case(
    routine: Routine, backend_name: str, case: Namespace, timer: Timer, repro: str
) -> tuple[Row, str]:
    """Time one routine with one backend.

    Returns
    -------
    dict
        A row for the sinks. ``status`` is ``ok``, ``refcheck failed`` or ``error: ...``; only an
        ``ok`` row has times.
    str
        Details for the terminal: the report of a failed check, the traceback of an error.
    """
    row: Row = dict(
        routine=routine.name,
        backend=backend_name,
        case_tag=case.case_tag,
        median_us=None,
        tflops_per_sec=None,
        cold_l2=not case.warm_l2,
        random_seed=case.random_seed,
        device=timer.device_name(),
        flashinfer_version=flashinfer.__version__,
        torch_version=torch.__version__,
        repro_command=repro,
    )
    row |= {flag.name: getattr(case, flag.name) for flag in routine.flags}
    case = Namespace(**{**vars(case), "backend": backend_name})  # some have inputs of their own
    try:
        return row | _measured(routine, routine.backends[backend_name], case, timer), ""
    except AssertionError as error:
        return row | dict(status="refcheck failed"), str(error)
    except Exception as error:
        summary = str(error).strip().splitlines()
        status = f"error: {type(error).__name__}: {summary[-1] if summary else ''}"
        return row | dict(status=status), traceback.format_exc()


@functools.cache
def gpu_complaint() -> str | None:
    """Why nothing can be timed here, or None."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = (
            "PyTorch was built without CUDA"
            if built is None
            else f"PyTorch (CUDA {built}) finds no device"
        )
        return f"no usable GPU: {why}"
    return None
