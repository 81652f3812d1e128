"""Products of up to 8 rows with weights ``[k, n]``, which one kernel reads once."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._common.arch import get_device_sm_count
from .._common.kernels import Kernel
from ..jit.few_rows import ROWS, FewRowsConfig, FewRowsOutput, gen_few_rows_module
from ._one_row import MOST_SPLITS, one_row_kernel, splits_of

_MOST_K = 1 << 15
_LARGE = 1 << 24  # elements of b from which on one row, too, is faster by the kernel of several
_WIDE_PART = 1024  # rows of b of a CTA with 128 columns


def takes(a: Any, b: Any) -> bool:
    """Whether the kernels multiply these: few rows, and rows of `b` that are contiguous."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    # The transpose of a weight, which is the usual case, first.
    if b.ndim != 2 or b.stride(0) == 1 or b.stride(1) != 1 or a.ndim != 2 or not a.is_cuda:
        return False
    return 1 <= len(a) <= ROWS and 1 <= len(b) <= _MOST_K


def product_kernel(device: torch.device, m: int, n: int, k: int) -> tuple[Kernel, int]:
    """The kernel for a product of `m` rows, and how many CTAs divide k."""
    if m == 1 and (n * k < _LARGE or n % 64 != 0 or k % 16 != 0):
        return one_row_kernel(device, n, k)
    return few_rows_kernel(device, n, k)


@functools.lru_cache(maxsize=4096)
def few_rows_kernel(
    device: torch.device, n: int, k: int, output: FewRowsOutput = FewRowsOutput.PRODUCT
) -> tuple[Kernel, int]:
    """The kernel for a product of up to 8 rows, and how many CTAs divide k.

    All CTAs run at once; of clusters, which they are without a norm, fewer fit the SMs.
    docs/tuning/serving_step_few.md has the measurements.
    """
    sms = get_device_sm_count(device)
    most = 2 * sms if output is FewRowsOutput.NORM else 3 * sms // 2
    columns, splits = 128, max(1, min(MOST_SPLITS, most // max(1, n // 128)))
    if output is FewRowsOutput.GATED:
        splits = 1
    elif n % 128 or k < splits * _WIDE_PART:
        columns, splits = 64, splits_of(-(-n // 64), k, 2 * sms)
    module = gen_few_rows_module(FewRowsConfig(torch.bfloat16, columns, output)).build_and_load()
    return module.few_rows, splits
