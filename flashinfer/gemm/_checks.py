"""Checks that the products share, and how cuBLASLt gets a scale."""

from __future__ import annotations

import torch

from .._common.checks import tensor as check_tensor
from .._common.dtypes import check_dtype


def check_out(
    out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, name: str = "out"
) -> None:
    """Refuse a destination, called `name`, that cannot receive a contiguous result.

    Raises
    ------
    TypeError, ValueError
        Saying what `out` is and what it must be.
    """
    if out is None:
        return
    check_tensor(name, out)
    if out.shape != shape:
        raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(out.shape)}")
    check_dtype(name, out.dtype, (dtype,))
    if not out.is_contiguous():
        raise ValueError(f"`{name}` must be contiguous, got strides {list(out.stride())}")


def aligned_scale(scale: torch.Tensor) -> torch.Tensor:
    """`scale`, of one element, at an address that cuBLASLt takes: it refuses those that are not on
    16 bytes."""
    scale = scale.reshape(())
    return scale if scale.data_ptr() % 16 == 0 else scale.clone()
