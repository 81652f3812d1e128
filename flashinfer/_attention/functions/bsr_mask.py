"""Masks of block-sparse matrices."""

import torch

from ..._common.checks import tensor as check_tensor
from ..._instrument.decorator import flashinfer_api
from ...trace.templates.sparse import (
    convert_bsr_mask_layout_trace,
)
from ..index_tensors import host_indices
from ..wrappers.sparse_checks import (
    check_mask,
    check_offsets,
)
from ..wrappers.sparse_tables import (
    bits_by_row_of_blocks,
)


@flashinfer_api(trace=convert_bsr_mask_layout_trace)
def convert_bsr_mask_layout(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Mask of a matrix in block compressed sparse rows, row by row in place of block by block.

    Parameters
    ----------
    mask : torch.Tensor
        Entries of each block, ``[nnz, R, C]``, bool; any strides and device.
    indptr : torch.Tensor
        First block of each row of blocks, ``[num_rows / R + 1]``, int32 or int64, from 0 to `nnz`
        and not decreasing.

    Returns
    -------
    torch.Tensor
        ``[nnz * R * C]``, bool, on the device of `mask`: for each row of blocks with n of them the
        ``[R, n * C]`` entries of its matrix rows.

    Raises
    ------
    TypeError
        If an argument is not a tensor.
    ValueError
        If a shape, a dtype or the offsets are not as listed above.
    """
    (host_indptr,) = host_indices({"indptr": indptr})
    check_offsets(host_indptr, host_indptr.numel())
    check_tensor("mask", mask)
    if mask.ndim != 3:
        raise ValueError(f"`mask` must have 3 dimensions, [nnz, R, C], got {list(mask.shape)}")
    check_mask(mask, int(host_indptr[-1]), mask.shape[1], mask.shape[2])
    return bits_by_row_of_blocks(mask, host_indptr)
