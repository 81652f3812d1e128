"""Loaded kernels of group quantisation, by configuration: private to the package."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._common import kernels as loading
from .._common.dtypes import FLOAT, check_dtype
from .._common.kernels import Kernel
from .._common.numbers import plain
from ..jit.quantization import GroupQuantConfig, gen_group_quant_module

_kernels: dict[tuple[Any, ...], Kernel] = {}
_NAMES = ("input", "x", "a")  # as in the binding, which names them in messages


def group_quant_kernel(input: torch.Tensor, *config: Any, name: str = "input") -> Kernel:
    """The kernel for the dtype of `input` and the other fields of `GroupQuantConfig`.

    Raises
    ------
    TypeError, ValueError
        If `input` (called `name` in messages) is no CUDA tensor, or there is no such kernel.
    """
    try:
        key = (name, input.dtype, *config)
        return _kernels[key]
    except (KeyError, AttributeError):
        loading.check_cuda_tensors(**{name: input})
    check_dtype(name, input.dtype, FLOAT)
    spec = gen_group_quant_module(GroupQuantConfig(input.dtype, *config))
    kernel = functools.partial(spec.build_and_load().group_quant, _NAMES.index(name))
    _kernels[key] = kernel
    return kernel


def check_matrix(name: str, tensor: object, width: int) -> torch.Tensor:
    """`tensor` itself if it is one whose last dimension is a multiple of `width`.

    Raises
    ------
    TypeError, ValueError
        Otherwise. What else can be wrong with it is for the kernel's binding to find.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.ndim == 0 or tensor.shape[-1] % width:
        raise ValueError(
            f"`{name}` must have a last dimension that is a multiple of {width}, got shape "
            f"{list(tensor.shape)}"
        )
    return tensor


def check_choice(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    """Refuse a value that is none of `allowed`.

    Raises
    ------
    ValueError
        Naming the argument, its value and what is allowed.
    """
    value = plain(value)
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        choices = " or ".join(map(repr, allowed))
        raise ValueError(f"`{name}` must be {choices}, got {value!r}")


def check_flag(**flags: object) -> None:
    """Refuse what is not a bool.

    Raises
    ------
    TypeError
        Naming the argument and what it is.
    """
    for name, value in flags.items():
        if not isinstance(plain(value), bool):
            raise TypeError(f"`{name}` must be True or False, got {type(value).__name__}")
