"""Page tables of block-sparse attention.

A row of blocks is a request whose pages are the blocks that it attends to, in order: the kernels
for paged caches then compute block-sparse attention as they are. What they see is the sequence of
the attended blocks, so that causality, which is between rows and columns of the whole matrix, has
to be brought into those terms: blocks above the diagonal are dropped, the last one is cut at the
diagonal, and where the request then still does not end on it, bits say what is visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SparseTable:
    """Requests of a block-sparse matrix.

    Attributes
    ----------
    qo_indptr, kv_indptr : torch.Tensor
        First row, and first entry in `kv_indices`, of each request: ``[requests + 1]``, int32, on
        the CPU.
    kv_len : torch.Tensor
        Columns of each request, ``[requests]``, int32, on the CPU. May leave out the end of the
        last page.
    kv_indices : torch.Tensor
        Page numbers, int32.
    page_size : int
        Columns of a page.
    causal : bool
        Whether causality aligned to the end of each request is what remains to be masked.
    packed_mask : torch.Tensor or None
        Visible columns of each row of each request, where `causal` does not say it: bits from the
        least significant one on, each request from a new byte on, uint8, on the CPU.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_len: torch.Tensor
    kv_indices: torch.Tensor
    page_size: int
    causal: bool
    packed_mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Attended blocks, sorted by request and then column; everything int64 on the CPU."""

    request: torch.Tensor  # of each block
    col_begin: torch.Tensor
    col_end: torch.Tensor
    base: torch.Tensor  # first page of each block's KV head
    row_begin: torch.Tensor  # of each request
    row_end: torch.Tensor

    @property
    def num_requests(self) -> int:
        return self.row_begin.numel()

    def select(self, keep: torch.Tensor) -> _Blocks:
        return _Blocks(
            self.request[keep],
            self.col_begin[keep],
            self.col_end[keep],
            self.base[keep],
            self.row_begin,
            self.row_end,
        )

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` over the blocks of each request."""
        total = torch.zeros(self.num_requests, dtype=torch.int64)
        return total.index_add_(0, self.request, values)


def bsr_table(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    shape: tuple[int, int],
    block: tuple[int, int],
    causal: bool,
    device: torch.device,
) -> SparseTable:
    """Requests of a matrix in block compressed sparse rows.

    Parameters
    ----------
    indptr, indices : torch.Tensor
        First block of each row of blocks, ``[rows / R + 1]``, and each block's column, both
        checked and on the CPU.
    shape, block : tuple of int
        Rows and columns of the matrix and of a block.
    causal : bool
        Whether row i sees columns up to ``i + columns - rows`` only.
    device : torch.device
        Device of the page numbers.
    """
    (rows, columns), (block_rows, block_cols) = shape, block
    indptr, indices = indptr.long(), indices.long()
    request = torch.repeat_interleave(torch.arange(rows // block_rows), indptr.diff())
    if causal:
        indices = indices[torch.argsort(request * (columns // block_cols) + indices, stable=True)]
    row_begin = torch.arange(0, rows, block_rows)
    blocks = _Blocks(
        request,
        indices * block_cols,
        (indices + 1) * block_cols,
        torch.zeros_like(indices),
        row_begin,
        row_begin + block_rows,
    )
    return _table(blocks, block_cols, columns - rows, causal, device)


def variable_block_table(
    block_map: torch.Tensor,
    row_sizes: torch.Tensor,
    col_sizes: torch.Tensor,
    causal: bool,
    device: torch.device,
) -> SparseTable:
    """Requests of one matrix per KV head, in blocks of any size.

    The requests of head h come before those of head h + 1, and so do their rows and pages: the
    heads' keys follow each other as if they were one head's. A page is the largest piece of which
    every block of columns is a multiple.

    Parameters
    ----------
    block_map : torch.Tensor
        Attended blocks, ``[num_kv_heads, row_blocks, col_blocks]``, bool, on the CPU.
    row_sizes, col_sizes : torch.Tensor
        Rows and columns of the blocks, ``[num_kv_heads, row_blocks]`` and ``[num_kv_heads,
        col_blocks]``, on the CPU; of one sum for all heads.
    causal, device
        As for :func:`bsr_table`.
    """
    row_sizes, col_sizes = row_sizes.long(), col_sizes.long()
    num_heads, num_row_blocks, _ = block_map.shape
    rows, columns = int(row_sizes[0].sum()), int(col_sizes[0].sum())
    page_size = math.gcd(*col_sizes.unique().tolist()) or 1
    row_end, col_end = row_sizes.cumsum(1), col_sizes.cumsum(1)
    head, row, col = (block_map & (col_sizes > 0)[:, None, :]).nonzero(as_tuple=True)
    blocks = _Blocks(
        head * num_row_blocks + row,
        (col_end - col_sizes)[head, col],
        col_end[head, col],
        head * (columns // page_size),
        (row_end - row_sizes).flatten(),
        row_end.flatten(),
    )
    return _table(blocks, page_size, columns - rows, causal, device)


def _table(
    blocks: _Blocks, page_size: int, shift: int, causal: bool, device: torch.device
) -> SparseTable:
    """`shift`: row i sees columns up to ``i + shift``."""
    mask = None
    if causal:
        blocks, on_diagonal = _cut_at_diagonal(blocks, shift)
        if not on_diagonal:
            causal, mask = False, _diagonal_bits(blocks, shift)
    kv_len = blocks.sums(blocks.col_end - blocks.col_begin)
    pages = -((blocks.col_begin - blocks.col_end) // page_size)
    kv_indptr = _offsets(blocks.sums(pages))
    qo_indptr = _offsets(blocks.row_end - blocks.row_begin)
    if max(int(kv_indptr[-1]), int(qo_indptr[-1]), int(kv_len.sum())) > INT32_MAX:
        raise ValueError(
            f"the attended blocks must have at most {INT32_MAX} columns over all rows of blocks, "
            f"got {int(kv_len.sum())} ({int(kv_indptr[-1])} pages)"
        )
    first_page = (blocks.base + blocks.col_begin // page_size).to(device)
    return SparseTable(
        qo_indptr.int(),
        kv_indptr.int(),
        kv_len.int(),
        _ranges(first_page, pages.to(device)).int(),
        page_size,
        causal,
        mask,
    )


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _ranges(first: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """first[0], ..., first[0] + lengths[0] - 1, first[1], ..."""
    shift = first - (lengths.cumsum(0) - lengths)
    values = torch.repeat_interleave(shift, lengths)
    return values + torch.arange(values.numel(), device=values.device)


def _cut_at_diagonal(blocks: _Blocks, shift: int) -> tuple[_Blocks, bool]:
    """Without the columns that no row of the request sees, and whether each request then ends in
    one block that holds the diagonal, so that what comes before is seen by all of its rows."""
    end = blocks.row_end + shift
    blocks = blocks.select(blocks.col_begin < end[blocks.request])
    blocks = replace(blocks, col_end=torch.minimum(blocks.col_end, end[blocks.request]))
    counts = blocks.sums(torch.ones_like(blocks.request))
    last = counts.cumsum(0)[counts > 0] - 1  # block of each request that has any
    request, last_end = blocks.request[last], blocks.col_end[last]
    holds = (blocks.col_begin[last] <= blocks.row_begin[request] + shift) & (
        last_end == end[request]
    )
    one_row = (blocks.row_end - blocks.row_begin)[request] == 1
    return blocks, bool((holds | one_row).all())


def _diagonal_bits(blocks: _Blocks, shift: int) -> torch.Tensor:
    """Visible columns of each row, request after request."""
    parts = []
    counts = blocks.sums(torch.ones_like(blocks.request)).tolist()
    begins, ends = blocks.col_begin.split(counts), blocks.col_end.split(counts)
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        rows = torch.arange(int(blocks.row_begin[i]), int(blocks.row_end[i])) + shift
        parts.append(pack_bits((_ranges(begin, end - begin) <= rows[:, None]).flatten()))
    return torch.cat(parts)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Bytes of a flat bool tensor, the least significant bit first, filled up with zeros."""
    bits = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (bits * weights).sum(1, dtype=torch.uint8)


def bits_by_row_of_blocks(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """``[nnz, R, C]`` entries by block as ``[R, blocks * C]`` for each row of blocks, flat."""
    indptr = indptr.long().to(mask.device)
    nnz, block_rows, block_cols = mask.shape
    counts = indptr.diff()
    row = torch.repeat_interleave(torch.arange(counts.numel(), device=mask.device), counts)
    place = torch.arange(nnz, device=mask.device) - indptr[row]  # of a block in its row
    first = indptr[row] * block_rows * block_cols + place * block_cols
    pitch = counts[row] * block_cols
    rows = torch.arange(block_rows, device=mask.device)
    columns = torch.arange(block_cols, device=mask.device)
    target = (first[:, None] + pitch[:, None] * rows)[:, :, None] + columns
    result = torch.empty(mask.numel(), dtype=mask.dtype, device=mask.device)
    result[target.flatten()] = mask.flatten()
    return result
