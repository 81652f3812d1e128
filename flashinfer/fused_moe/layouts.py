"""Orders of a weight's elements: plain PyTorch, on every device."""

from __future__ import annotations

import torch

from .._common import checks


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
