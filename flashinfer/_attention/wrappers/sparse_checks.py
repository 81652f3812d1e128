"""Arguments of block-sparse attention, checked on the host."""

from __future__ import annotations

from typing import Any

import torch

from ..._common.checks import count as check_count
from ..._common.checks import tensor as check_tensor
from ..._common.dtypes import torch_name
from ..checks import split_scales
from ..index_tensors import host_indices
from ..plan.spec import AttentionSpec


def check_bsr(
    indptr: Any, indices: Any, M: Any, N: Any, R: Any, C: Any
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int, int]]:
    """Offsets and columns of the blocks, int32 on the CPU; M, N, R and C.

    Raises
    ------
    TypeError, ValueError
        If they are not those of a matrix of M x N in blocks of R x C.
    """
    R, C = check_count("R", R), check_count("C", C)
    M, N = check_count("M", M, 0), check_count("N", N, 0)
    for name, size, block_name, block in (("M", M, "R", R), ("N", N, "C", C)):
        if size % block:
            raise ValueError(f"`{name}` must be a multiple of `{block_name}` = {block}, got {size}")
    rows, columns = host_indices({"indptr": indptr, "indices": indices})
    check_offsets(rows, M // R + 1)
    nnz = int(rows[-1])
    if columns.numel() < nnz:
        raise ValueError(
            f"`indices` must have at least the {nnz} entries of `indptr`, got {columns.numel()}"
        )
    columns = columns[:nnz]
    if nnz and not 0 <= int(columns.min()) <= int(columns.max()) < N // C:
        bad = int(columns.min()) if int(columns.min()) < 0 else int(columns.max())
        raise ValueError(f"`indices` must be from 0 to N / C - 1 = {N // C - 1}, got {bad}")
    block_row = torch.repeat_interleave(torch.arange(M // R), rows.diff().long())
    blocks, counts = (block_row * (N // C) + columns).unique(return_counts=True)
    if blocks.numel() != nnz:
        twice = int(blocks[counts > 1][0])
        raise ValueError(
            f"`indices` must name a block once per row of blocks, got {twice % (N // C)} more than "
            f"once in row {twice // (N // C)}"
        )
    return rows, columns, (M, N, R, C)


def check_offsets(indptr: torch.Tensor, length: int) -> None:
    """Refuse what is not the first block of each row of blocks."""
    if indptr.numel() != length or length < 1:
        raise ValueError(f"`indptr` must have {max(length, 1)} entries, got {indptr.numel()}")
    if int(indptr[0]) != 0 or bool((indptr.diff() < 0).any()):
        raise ValueError(
            f"`indptr` must begin with 0 and not decrease, got {indptr[:8].tolist()}"
            f"{'...' if indptr.numel() > 8 else ''}"
        )


def check_mask(mask: Any, nnz: int, block_rows: int, block_cols: int) -> None:
    """Refuse what is not a bool for each entry of each block."""
    check_shape("mask", mask, (nnz, block_rows, block_cols))
    if mask.dtype != torch.bool:
        raise ValueError(f"`mask` must have dtype bool, got {torch_name(mask.dtype)}")


def check_variable_blocks(
    block_map: Any, row_sizes: Any, col_sizes: Any, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block map and the sizes (int64) on the CPU.

    Raises
    ------
    TypeError, ValueError
        If they do not describe one matrix per KV head, all of the same size.
    """
    check_tensor("block_mask_map", block_map)
    if block_map.ndim != 3 or block_map.shape[0] != num_kv_heads:
        raise ValueError(
            f"`block_mask_map` must have shape [{num_kv_heads}, row_blocks, col_blocks], got "
            f"{list(block_map.shape)}"
        )
    if block_map.dtype != torch.bool:
        raise ValueError(
            f"`block_mask_map` must have dtype bool, got {torch_name(block_map.dtype)}"
        )
    sizes = []
    for name, tensor, blocks in (
        ("block_row_sz", row_sizes, block_map.shape[1]),
        ("block_col_sz", col_sizes, block_map.shape[2]),
    ):
        check_shape(name, tensor, (num_kv_heads, blocks))
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"`{name}` must have dtype int32 or int64, got {torch_name(tensor.dtype)}"
            )
        tensor = tensor.cpu().long()
        if bool((tensor < 0).any()):
            raise ValueError(f"`{name}` must not be negative, got {int(tensor.min())}")
        sums = tensor.sum(1)
        if bool((sums != sums[0]).any()):
            raise ValueError(f"`{name}` must have one sum for all heads, got {sums.tolist()}")
        sizes.append(tensor)
    return block_map.cpu(), sizes[0], sizes[1]


def check_shape(name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    """Refuse what is not a tensor of this shape."""
    check_tensor(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(tensor.shape)}")


def check_result(
    name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a destination, if there is one, that the result does not fit."""
    if tensor is None:
        return
    check_shape(name, tensor, shape)
    if tensor.dtype != dtype:
        raise ValueError(
            f"`{name}` must have dtype {torch_name(dtype)}, got {torch_name(tensor.dtype)}"
        )
    if tensor.device != device:
        raise ValueError(f"`{name}` must be on {device}, got {tensor.device}")


def check_scales(
    spec: AttentionSpec,
    device: torch.device,
    scales: tuple[Any, Any, Any],
    names: tuple[str, str, str],
) -> None:
    """Refuse what are no scales of queries, keys and values."""
    if any(scale is not None for scale in scales):
        split_scales(device, spec.num_qo_heads, spec.num_kv_heads, *scales, names)


def refuse_positions(pos_encoding_mode: Any) -> None:
    """Refuse encodings of positions, which the kernel would count over the attended columns."""
    if pos_encoding_mode != "NONE":
        raise ValueError(
            "`pos_encoding_mode` must be 'NONE': a sparse kernel does not know the place of a key "
            f"in the matrix, got {pos_encoding_mode!r}; rotate q and k before"
        )
