"""Checks of arguments that the recurrent layers' functions share."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._common.checks import flag as check_flag
from .._common.checks import tensor as check_tensor
from .._common.dtypes import HALF, check_dtype


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """`scale`, or one over the root of the head size; finite."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"`scale` must be a float or None, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"`scale` must be finite, got {scale}")
    return float(scale)


def check_flags(**flags: Any) -> None:
    """Bools, by name."""
    for name, value in flags.items():
        check_flag(name, value)


def check_backend(backend: str | None, *allowed: str | None) -> None:
    """Refuse a backend that this package does not have."""
    if backend not in allowed:
        raise ValueError(f"`backend` must be one of {list(allowed)}, got {backend!r}")


def check_one_of(**values: Any) -> None:
    """Exactly one of the arguments must be given."""
    given = [name for name, value in values.items() if value is not None]
    if len(given) != 1:
        names = " and ".join(f"`{name}`" for name in values)
        raise ValueError(f"exactly one of {names} must be given, got {given or 'neither'}")


def destination(
    name: str, out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor
) -> torch.Tensor:
    """`out`, of this shape and the dtype and device of `like`, or a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    check_tensor(name, out)
    if tuple(out.shape) != shape:
        raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(out.shape)}")
    if out.dtype != like.dtype:
        raise ValueError(f"`{name}` must have dtype {like.dtype}, got {out.dtype}")
    return out


def check_operands(ndim: int, **operands: Any) -> None:
    """Queries, keys and values: tensors of so many dimensions, of 16 bits."""
    for name, operand in operands.items():
        check_dtype(name, check_tensor(name, operand, ndim).dtype, HALF)


def check_slots(name: str, slots: Any, *ndims: int) -> torch.Tensor:
    """Integer slots of a pool, or other indices."""
    found = check_tensor(name, slots, *ndims)
    if found.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`{name}` must have dtype int32 or int64, got {found.dtype}")
    return found


def count_sequences(cu_seqlens: Any) -> int:
    """Packed sequences, of which `cu_seqlens` has the beginnings and the end."""
    if check_tensor("cu_seqlens", cu_seqlens, 1).shape[0] == 0:
        raise ValueError("`cu_seqlens` must have at least one element, got shape [0]")
    return int(cu_seqlens.shape[0]) - 1


def check_shapes(**tensors: tuple[Any, tuple[int | None, ...]]) -> None:
    """Tensors and their shapes; None: any size."""
    for name, (tensor, shape) in tensors.items():
        found = check_tensor(name, tensor, len(shape)).shape
        if any(size not in (None, have) for size, have in zip(shape, found, strict=True)):
            wanted = ["any" if size is None else size for size in shape]
            raise ValueError(f"`{name}` must have shape {wanted}, got {list(found)}")
