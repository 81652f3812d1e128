"""Checks of arguments that every family shares, in one wording.

Each check takes the argument's name and value, returns the value in its plain form (NumPy's numbers
become Python's) and raises ``TypeError`` or ``ValueError`` with the name, what it got and what is
allowed. Facts about tensors that a kernel's binding checks (shape, stride, overlap) are not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .dtypes import check_dtype
from .numbers import plain


def tensor(name: str, value: Any, *ndims: int) -> torch.Tensor:
    """A tensor, with one of the numbers of dimensions `ndims` if there are any."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(value).__name__}")
    if ndims and value.ndim not in ndims:
        allowed = " or ".join(map(str, ndims))
        raise ValueError(f"`{name}` must have {allowed} dimensions, got shape {list(value.shape)}")
    return value


def tensors(**values: Any) -> None:
    """Tensors, by name."""
    for name, value in values.items():
        tensor(name, value)


def cuda_tensors(**tensors: Any) -> None:
    """Dense CUDA tensors, by name."""
    for name, value in tensors.items():
        tensor(name, value)
        if value.layout is not torch.strided:
            raise ValueError(f"`{name}` must be a dense tensor, got {value.layout}")
        if not value.is_cuda:
            hint = (
                "" if torch.cuda.is_available() else "; without a GPU: FLASHINFER_BACKEND=reference"
            )
            raise ValueError(f"`{name}` must be a CUDA tensor, got one on {value.device}{hint}")


def matrix(name: str, value: Any, width: int) -> torch.Tensor:
    """A tensor whose last dimension is a multiple of `width`."""
    rows = tensor(name, value)
    if rows.ndim == 0 or rows.shape[-1] % width:
        raise ValueError(
            f"`{name}` must have a last dimension that is a multiple of {width}, got shape "
            f"{list(rows.shape)}"
        )
    return rows


def contiguous(name: str, value: Any, *ndims: int) -> torch.Tensor:
    """A contiguous tensor, with one of the numbers of dimensions `ndims` if there are any."""
    if not tensor(name, value, *ndims).is_contiguous():
        raise ValueError(f"`{name}` must be contiguous, got strides {list(value.stride())}")
    return value


def same_device(**tensors: torch.Tensor | None) -> None:
    """Tensors on one device; those that are None do not count."""
    given = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    (first, reference), others = given[0], given[1:]
    for name, tensor in others:
        if tensor.device != reference.device:
            raise ValueError(
                f"`{name}` must be on {reference.device} as `{first}` is, got {tensor.device}"
            )


def flag(name: str, value: Any) -> bool:
    """A bool."""
    if value is not True and value is not False:
        value = plain(value)
        if not isinstance(value, bool):
            raise TypeError(f"`{name}` must be a bool, got {_shown(value)}")
    return value


def optional_flag(name: str, value: Any) -> bool | None:
    """A bool or None."""
    if value is not None and value is not True and value is not False:
        value = plain(value)
        if not isinstance(value, bool):
            raise TypeError(f"`{name}` must be a bool or None, got {_shown(value)}")
    return value


def count(name: str, value: Any, low: int = 1, high: int = 2**31 - 1) -> int:
    """An int from `low` to `high`."""
    if type(value) is not int:
        value = plain(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"`{name}` must be an int, got {_shown(value)}")
    if not low <= value <= high:
        raise ValueError(f"`{name}` must be from {low} to {high}, got {value}")
    return value


def number(name: str, value: Any) -> float:
    """A finite int or float, as a float."""
    if type(value) is not float:
        value = plain(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"`{name}` must be a number, got {_shown(value)}")
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite, got {value}")
    return float(value)


def choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """One of `allowed`, and of its type: 1 is not True."""
    value = plain(value)
    if not any(type(value) is type(known) and value == known for known in allowed):
        listed = " or ".join(map(repr, allowed))
        error = ValueError if any(type(value) is type(known) for known in allowed) else TypeError
        raise error(f"`{name}` must be {listed}, got {_shown(value)}")
    return value


def dtype(name: str, value: Any, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    """A dtype among `allowed`."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"`{name}` must be a torch.dtype, got {_shown(value)}")
    check_dtype(name, value, allowed)
    return value


def optional_generator(name: str, value: Any) -> torch.Generator | None:
    """A source of random numbers or None."""
    if not isinstance(value, (torch.Generator, type(None))):
        raise TypeError(f"`{name}` must be a torch.Generator or None, got {_shown(value)}")
    return value


@contextmanager
def named(**names: str) -> Iterator[None]:
    """Refusals inside say the caller's name of an argument: ``named(theirs="caller's")``."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error)
        for inner, outer in names.items():
            text = text.replace(f"`{inner}`", f"`{outer}`")
        raise type(error)(text) from None


def _shown(value: Any) -> str:
    """`value` as a message shows it: a large object, or one on a GPU, by its type alone."""
    plain_types = (bool, int, float, complex, str, torch.dtype, type(None))
    return repr(value) if isinstance(value, plain_types) else type(value).__name__
