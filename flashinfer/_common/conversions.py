"""Tensors of another dtype than kernels read, brought to the one that they do.

A binding refuses such a tensor before any GPU work. A function that takes it then converts it and
calls again, so that a call with the right dtypes pays nothing:

    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, {2: torch.int32, 3: torch.int32}))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def is_convertible(tensor: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor holds numbers of the kind of `dtype`, in another dtype than that."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype in (dtype, torch.bool):
        return False
    kinds = tensor.is_floating_point(), tensor.is_complex()
    return kinds == (dtype.is_floating_point, dtype.is_complex)


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in another dtype of its kind; an integer beyond int32 becomes the nearest in it.

    So an index that no tensor has stays one, where cutting off bits could make it valid.
    """
    if dtype is torch.int32:
        # Unsigned dtypes have no clamp of their own.
        tensor = tensor.to(torch.int64).clamp(-(2**31), 2**31 - 1)
    return tensor.to(dtype)


def converted(arguments: Sequence[Any], dtypes: Mapping[int, torch.dtype]) -> list[Any]:
    """Arguments that a kernel has refused, with those at the places in `dtypes` converted.

    Called while the refusal is handled: it is raised again if there is nothing to convert.
    """
    result = list(arguments)
    for place, dtype in dtypes.items():
        if is_convertible(result[place], dtype):
            result[place] = as_dtype(result[place], dtype)
    if all(now is before for now, before in zip(result, arguments, strict=True)):
        raise
    return result
