"""Orders of a weight's elements: plain PyTorch, on every device."""

from __future__ import annotations

import torch

from .._common import checks
from .._moe.four_bit import INTEGER_GROUPS, SCALE_TYPES, find_format


def convert_to_block_layout(input_tensor: torch.Tensor, blockK: int) -> torch.Tensor:
    """Columns of a matrix in blocks: ``result[b, r, c] = input_tensor[r, b * blockK + c]``.

    Parameters
    ----------
    input_tensor : torch.Tensor
        ``[rows, columns]``, of any dtype.
    blockK : int
        Columns of a block; divides the columns.

    Returns
    -------
    torch.Tensor
        ``[columns / blockK, rows, blockK]``, contiguous.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    rows, columns = checks.tensor("input_tensor", input_tensor, 2).shape
    if columns % checks.count("blockK", blockK):
        raise ValueError(f"`blockK` must divide the {columns} columns, got {blockK}")
    blocks = input_tensor.reshape(rows, columns // blockK, blockK)
    return blocks.transpose(0, 1).contiguous()


def get_reorder_rows_for_gated_act_gemm_row_indices(x: torch.Tensor) -> torch.Tensor:
    """The rows of `reorder_rows_for_gated_act_gemm` in their order, ``[rows]``, int64."""
    checks.tensor("x", x, 2)
    if x.shape[0] % 2:
        raise ValueError(f"`x` must have an even number of rows, got {list(x.shape)}")
    return torch.arange(x.shape[0], device=x.device).view(2, x.shape[0] // 2).t().reshape(-1)


def reorder_rows_for_gated_act_gemm(x: torch.Tensor) -> torch.Tensor:
    """Rows of both halves take turns: 0, n / 2, 1, n / 2 + 1, and so on.

    Parameters
    ----------
    x : torch.Tensor
        ``[n, columns]``, of any dtype, with an even n.

    Returns
    -------
    torch.Tensor
        ``[n, columns]``, contiguous.

    Raises
    ------
    TypeError, ValueError
        If `x` is no such matrix.
    """
    return x[get_reorder_rows_for_gated_act_gemm_row_indices(x)].contiguous()


def interleave_moe_weights_for_sm90_mixed_gemm(
    weight: torch.Tensor, quant_type: str = "fp4"
) -> torch.Tensor:
    """The 4-bit weights that `cutlass_fused_moe` reads on Hopper: those of the checkpoint.

    Its kernels take the codes in their own order, so that nothing has to be prepared.

    Parameters
    ----------
    weight : torch.Tensor
        ``[experts, rows, k / 2]``, uint8, the first of two codes in the lower four bits.
    quant_type : {"fp4", "int4"}
        e2m1, or two's complement.

    Returns
    -------
    torch.Tensor
        `weight`, contiguous: itself if it is.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    checks.choice("quant_type", quant_type, ("fp4", "int4"))
    checks.tensor("weight", weight, 3)
    checks.dtype("weight", weight.dtype, (torch.uint8,))
    return weight.contiguous()


def interleave_moe_scales_for_sm90_mixed_gemm(
    scales: torch.Tensor, group_size: int = 32
) -> torch.Tensor:
    """The scales of 4-bit weights that `cutlass_fused_moe` reads on Hopper: the checkpoint's.

    Parameters
    ----------
    scales : torch.Tensor
        ``[experts, rows, k / group_size]``: uint8 or float8_e8m0fnu for MXFP4, float8_e4m3fn for
        NVFP4, bfloat16, float16 or float32 for integers.
    group_size : int
        Elements of k that share a scale: 32 for MXFP4, 16 for NVFP4, 32, 64 or 128 for integers.

    Returns
    -------
    torch.Tensor
        `scales`, contiguous: itself if it is.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    checks.tensor("scales", scales, 3)
    checks.dtype("scales", scales.dtype, SCALE_TYPES)
    weight_format, group = find_format(scales, 0)
    allowed = INTEGER_GROUPS if weight_format == "int4" else (group,)
    checks.choice("group_size", group_size, allowed)
    return scales.contiguous()
