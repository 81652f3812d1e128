"""Products of one row with weights ``[k, n]``, which one kernel reads once."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._common.arch import get_device_sm_count
from .._common.kernels import Kernel
from ..jit.one_row import COLUMNS, OneRowConfig, gen_one_row_module

_MOST_K = 1 << 15
_MOST_SPLITS = 8
_LEAST_PART = 128  # rows of b of a CTA


def takes(a: Any, b: Any) -> bool:
    """Whether the kernel multiplies these: one row, and rows of `b` that are contiguous."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.is_cuda):
        return False
    if a.ndim != 2 or b.ndim != 2 or b.stride(1) != 1 or b.stride(0) == 1:
        return False
    return len(a) == 1 and len(b) <= _MOST_K


@functools.lru_cache(maxsize=4096)
def one_row_kernel(device: torch.device, n: int, k: int, norm: bool = False) -> tuple[Kernel, int]:
    """The kernel for a product, perhaps of a norm, and how many CTAs divide k.

    All CTAs run at once, two of an SM. docs/tuning/serving_step.md has the measurements.
    """
    columns, splits = choose(n, k, get_device_sm_count(device))
    module = gen_one_row_module(OneRowConfig(torch.bfloat16, columns, norm)).build_and_load()
    return module.one_row, splits


def choose(n: int, k: int, num_sms: int) -> tuple[int, int]:
    """Columns of a thread block, and how many divide k: all run at once, evenly over the SMs."""
    most = 2 * num_sms
    columns = next((size for size in COLUMNS if -(-n // size) <= most), COLUMNS[-1])
    tiles = -(-n // columns)

    def share(splits: int) -> float:
        """How much of the SMs' time thread blocks have."""
        blocks = tiles * splits
        return blocks / (-(-blocks // num_sms) * num_sms)

    fitting = [
        splits
        for splits in range(1, _MOST_SPLITS + 1)
        if splits == 1 or (tiles * splits <= most and k >= splits * _LEAST_PART)
    ]
    return columns, max(fitting, key=lambda splits: (round(share(splits), 2), splits))
