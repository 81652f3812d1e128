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

    All CTAs run at once, three of an SM. docs/tuning/serving_step.md has the measurements.
    """
    most = 3 * get_device_sm_count(device)
    columns = next((size for size in COLUMNS if -(-n // size) <= most), COLUMNS[-1])
    splits = 1
    while (
        2 * splits <= _MOST_SPLITS
        and -(-n // columns) * 2 * splits <= most
        and k >= 2 * splits * _LEAST_PART
    ):
        splits *= 2
    module = gen_one_row_module(OneRowConfig(torch.bfloat16, columns, norm)).build_and_load()
    return module.one_row, splits
