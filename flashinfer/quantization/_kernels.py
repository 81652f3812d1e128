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


SCALE_BLOCK = 128
"""Elements of a row that share a scale in products of 8-bit blocks."""

_LEAST_MAGNITUDE = 1e-10  # as the default of `per_token_group_quant_8bit`


def rows_config(dtype: torch.dtype, layout: str = "linear") -> GroupQuantConfig:
    """The kernel of `quantize_rows` for rows of a type, whose scales have a layout."""
    return GroupQuantConfig(dtype, "e4m3", "float32", layout, SCALE_BLOCK, False)


def quantize_rows(
    x: torch.Tensor,
    *,
    column_major: bool = False,
    name: str = "x",
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    enable_pdl: bool | None = None,
    launches_early: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes of a matrix and their scales, ``[rows, columns / 128]``, float32.

    Parameters
    ----------
    x : torch.Tensor
        ``[rows, columns]``; columns are a multiple of 128.
    column_major : bool
        Whether the scales of a column, not of a row, are neighbours.
    name : str
        The name of `x` in messages.
    out : (torch.Tensor, torch.Tensor), optional
        Codes and scales that are written, of the shapes above; the scales of a row are neighbours.
    enable_pdl : bool, optional
        Programmatic dependent launch; None takes it where the device has it.
    launches_early : bool
        Whether the next kernel may begin before this one has waited for those before: it then waits
        for this one before it reads what any of them writes.

    Raises
    ------
    TypeError, ValueError
        As `group_quant_kernel`.
    """
    layout = "column_major" if column_major else "linear"
    kernel = group_quant_kernel(x, "e4m3", "float32", layout, SCALE_BLOCK, False, name=name)
    if out is not None:
        kernel(*out, x, None, _LEAST_MAGNITUDE, False, enable_pdl, launches_early)
        return out
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    rows, blocks = x.shape[0], x.shape[1] // SCALE_BLOCK
    shape = (blocks, rows) if column_major else (rows, blocks)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    kernel(codes, scale, x, None, _LEAST_MAGNITUDE, False, enable_pdl, launches_early)
    return codes, scale.t() if column_major else scale
