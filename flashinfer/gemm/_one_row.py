"""Products of one row with weights ``[k, n]``, which one kernel reads once."""

from __future__ import annotations

import functools

import torch

from .._common.arch import get_device_sm_count
from .._common.kernels import Kernel
from ..jit.one_row import (
    COLUMNS,
    OneRowConfig,
    OneRowHeadsConfig,
    OneRowRouteConfig,
    gen_one_row_heads_module,
    gen_one_row_module,
    gen_one_row_route_module,
)

MOST_SPLITS = 8
_MOST_ROUTE_SPLITS = 16  # of a router's few columns, so that all its weights are loaded early
_LEAST_PART = 128  # rows of b of a CTA


@functools.lru_cache(maxsize=4096)
def one_row_kernel(device: torch.device, n: int, k: int, norm: bool = False) -> tuple[Kernel, int]:
    """The kernel for a product, perhaps of a norm, and how many CTAs divide k.

    All CTAs run at once, three of an SM. docs/tuning/serving_step_few.md has the measurements.
    """
    most = 3 * get_device_sm_count(device)
    columns = next((size for size in COLUMNS if -(-n // size) <= most), COLUMNS[-1])
    module = gen_one_row_module(OneRowConfig(torch.bfloat16, columns, norm)).build_and_load()
    return module.one_row, splits_of(-(-n // columns), k, most)


def splits_of(tiles: int, k: int, most: int, most_splits: int = MOST_SPLITS) -> int:
    """CTAs that divide k, a power of two, where `most` run at once."""
    splits = 1
    while (
        2 * splits <= most_splits and tiles * 2 * splits <= most and k >= 2 * splits * _LEAST_PART
    ):
        splits *= 2
    return splits


@functools.lru_cache(maxsize=4096)
def heads_kernel(
    device: torch.device,
    n: int,
    k: int,
    head_dim: int,
    cached: torch.dtype,
    cos_sin: torch.dtype,
    is_neox: bool,
) -> tuple[Kernel, int]:
    """The kernel for heads of queries, keys and values, and how many CTAs divide k."""
    config = OneRowHeadsConfig(torch.bfloat16, cached, cos_sin, not is_neox, head_dim)
    kernel = gen_one_row_heads_module(config).build_and_load().one_row_heads
    return kernel, splits_of(n // head_dim, k, 3 * get_device_sm_count(device))


@functools.lru_cache(maxsize=4096)
def route_kernel(device: torch.device, n: int, k: int) -> tuple[Kernel, int]:
    """The kernel for a router's logits and choice, and how many CTAs divide k."""
    columns = next(size for size in COLUMNS if n <= size)
    module = gen_one_row_route_module(OneRowRouteConfig(torch.bfloat16, columns))
    splits = splits_of(1, k, get_device_sm_count(device), _MOST_ROUTE_SPLITS)
    return module.build_and_load().one_row_route, splits
