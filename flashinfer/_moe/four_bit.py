"""Experts with 4-bit weights and 16-bit activations: formats, and their grouped products.

The checkpoints' own order of codes and scales is what the kernels read.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._common import checks
from ..gemm._weight_kernels import choose_weight_config, get_weight_gemm_kernel, is_aligned
from ..jit.gemm import GATED
from .maps import RowMap

INTEGER_GROUPS = (32, 64, 128)
_FLOAT_FORMATS = {
    torch.uint8: ("mxfp4", 32),
    torch.float8_e8m0fnu: ("mxfp4", 32),
    torch.float8_e4m3fn: ("nvfp4", 16),
}
SCALE_TYPES = (torch.bfloat16, torch.float16, torch.float32, *_FLOAT_FORMATS)
_NAMES = 2  # what the binding calls the first product's tensors; then the second one's


def find_format(scale: torch.Tensor, k: int) -> tuple[str, int]:
    """The format that a weight's scales belong to, and the elements of k that share one."""
    if scale.dtype in _FLOAT_FORMATS:
        return _FLOAT_FORMATS[scale.dtype]
    groups = scale.shape[-1]
    return "int4", k // groups if groups and k % groups == 0 else 0


def as_bytes(scales: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The scales, with one byte for each where four of MXFP4 stand in an int32.

    Callers of kernels that read whole words view MXFP4's bytes so.
    """
    if not scales or getattr(scales[0], "dtype", None) != torch.int32:
        return scales
    for i, scale in enumerate(scales):
        checks.contiguous(f"quant_scales[{i}]", scale)
        checks.dtype(f"quant_scales[{i}]", scale.dtype, (torch.int32,))
    return tuple(scale.view(torch.uint8) for scale in scales)


def check_scales(
    scales: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, torch.Tensor],
    input_dtype: torch.dtype,
) -> None:
    """Refuse scales that are not those of `weights`: of groups, and for NVFP4 of experts, too."""
    for i, scale in enumerate(scales[:2]):
        checks.tensor(f"quant_scales[{i}]", scale)
    allowed = (input_dtype, torch.float32, *_FLOAT_FORMATS)
    for i, (scale, weight) in enumerate(zip(scales, weights, strict=False)):
        name, k = f"quant_scales[{i}]", 2 * weight.shape[2]
        checks.dtype(name, scale.dtype, allowed if i == 0 else (scales[0].dtype,))
        weight_format, group = find_format(scale, k)
        groups = (group,) if weight_format != "int4" else INTEGER_GROUPS
        shapes = [[*weight.shape[:2], k // group] for group in groups if k % group == 0]
        if list(scale.shape) not in shapes:
            raise ValueError(
                f"`{name}` must have shape {' or '.join(map(str, shapes))} for {weight_format} "
                f"weights as checkpoints have them, got {list(scale.shape)}"
            )
    count = 4 if scales and find_format(scales[0], 1)[0] == "nvfp4" else 2
    if len(scales) != count:
        raise ValueError(
            f"`quant_scales` must have {count} tensors for these weights, got {len(scales)}"
        )
    experts = weights[0].shape[0]
    for i, factor in enumerate(scales[2:], 2):
        checks.tensor(f"quant_scales[{i}]", factor)
        checks.dtype(f"quant_scales[{i}]", factor.dtype, (torch.float32,))
        if factor.numel() != 1 and factor.shape != (experts,):
            raise ValueError(
                f"`quant_scales[{i}]` must have one element or shape [{experts}], got "
                f"{list(factor.shape)}"
            )


def rows_of_a_tile(rows: int, experts: int) -> tuple[int, int]:
    """Rows that most experts have at most, and experts that have any, where rows choose at random.

    The number of an expert's rows is Poisson distributed.
    """
    mean = rows / experts
    return max(1, math.ceil(mean + 1.5 * mean**0.5)), max(
        1, round(experts * (1.0 - math.exp(-mean)))
    )


def multiply(
    index: int,
    out: torch.Tensor,
    a: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    rows: RowMap,
    *,
    here_of_all: float,
    activation: str = "identity",
    gate: tuple[Any, Any, Any] | None = None,
    enable_pdl: bool | None = None,
) -> None:
    """The first (`index` 0, gathered) or second product of the rows in `rows`.

    Parameters
    ----------
    out, a : torch.Tensor
        ``[rows, columns]`` and what is read: tokens, or rows.
    weight : torch.Tensor
        ``[experts, columns, k / 2]``, uint8.
    scales : tuple of torch.Tensor
        The scales of both weights, and the factors of NVFP4.
    here_of_all : float
        The part of all experts that is here.
    """
    k, experts = a.shape[1], weight.shape[0]
    scale = scales[index]
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    weight_format, group = find_format(scale, k)
    rows_of_tile, tiles = rows_of_a_tile(max(1, round(out.shape[0] * here_of_all)), experts)
    config = choose_weight_config(
        a.device,
        a.dtype,
        out.dtype,
        weight_format,
        scale.dtype,
        group,
        rows_of_tile,
        weight.shape[1],
        k,
        activation,
        tiles,
        is_aligned(scale),
    )
    factor = scales[2 + index].reshape(-1) if weight_format == "nvfp4" else None
    get_weight_gemm_kernel(config)(
        _NAMES + index,
        out,
        a,
        weight,
        scale,
        factor,
        bias,
        # The map is ready before the first product begins, which writes what the second one reads.
        (rows.offsets, rows.row_token if index == 0 else None, index == 1),
        gate if activation in GATED else None,
        enable_pdl,
    )
