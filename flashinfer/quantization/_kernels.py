"""Loaded kernels of group quantisation, by configuration: private to the package."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._common.dtypes import FLOAT, check_dtype
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from ..jit.quantization import GroupQuantConfig, gen_group_quant_module


def _table(name: str, index: int) -> KernelTable:
    """Kernels of the functions whose input is called `name`, the name number `index` there."""

    def get_kernel(dtype: torch.dtype, *config: Any) -> Kernel:
        check_dtype(name, dtype, FLOAT)
        module = gen_group_quant_module(GroupQuantConfig(dtype, *config)).build_and_load()
        return functools.partial(module.group_quant, index)

    return KernelTable(get_kernel)


# In the order of the binding, which names the input in messages.
_tables = {name: _table(name, index) for index, name in enumerate(("input", "x", "a"))}


def group_quant_kernel(input: torch.Tensor, *config: Any, name: str = "input") -> Kernel:
    """The kernel for the dtype of `input` and the other fields of `GroupQuantConfig`.

    Raises
    ------
    TypeError, ValueError
        If `input` (called `name` in messages) is no CUDA tensor, or there is no such kernel.
    """
    table = _tables[name]
    try:
        key = (input.dtype, *config)
        return table[key]
    except NOT_LOADED:
        return table.load(*config, **{name: input})
