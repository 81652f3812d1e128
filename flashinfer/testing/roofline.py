"""What the device can do, measured once, and rates relative to it."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

from .timing import bench_gpu_time_with_cudagraph

__all__ = ["copy_bandwidth_tb_per_sec", "percent", "tb_per_sec", "tflops_per_sec"]

_COPY_BYTES = 1 << 30


def tb_per_sec(nbytes: float, ms: float) -> float:
    """1e12 bytes per second, from bytes and milliseconds."""
    return nbytes / ms / 1e9


def tflops_per_sec(flops: float, ms: float) -> float:
    """1e12 operations per second, from operations and milliseconds."""
    return flops / ms / 1e9


def percent(value: float, of: float) -> float:
    """``value`` in percent of ``of``."""
    return 100.0 * value / of


@functools.cache
def copy_bandwidth_tb_per_sec(device_index: int | None = None) -> float:
    """Device-to-device copy bandwidth in TB/s, bytes read plus written; measured once per process.

    The ceiling for kernels that stream their operands once. It is measured over 1 GiB, because a
    datasheet's rate is not reached by any program, and is the better of the driver's copy and of an
    element-wise kernel: on an H200 the driver's copy reaches 2.8 TB/s, a kernel over 4.

    Parameters
    ----------
    device_index : int, optional
        CUDA device; the current one by default.
    """
    index = torch.cuda.current_device() if device_index is None else device_index
    with torch.cuda.device(index):
        source = torch.empty(_COPY_BYTES // 4, dtype=torch.int32, device="cuda")
        source.random_()  # constant data can move faster than real data
        target = torch.empty_like(source)

        def milliseconds(copy: Callable[[torch.Tensor], object]) -> float:
            times = bench_gpu_time_with_cudagraph(
                copy,
                dry_run_iters=3,
                repeat_iters=10,
                num_iters_within_graph=4,
                input_args=(source,),
            )
            return statistics.median(times)

        best = min(
            milliseconds(target.copy_),
            milliseconds(lambda tensor: torch.bitwise_not(tensor, out=target)),
        )
    return tb_per_sec(2 * _COPY_BYTES, best)
