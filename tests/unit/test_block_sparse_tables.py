"""Block-sparse matrices as page tables: what the kernel would see is the matrix again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer._attention.wrappers.sparse_tables import (
    SparseTable,
    bsr_table,
    pack_bits,
    variable_block_table,
)

CPU = torch.device("cpu")


def seen_through(table: SparseTable, num_columns: int) -> torch.Tensor:
    """[rows, num_columns]: how often a kernel for paged requests shows each row each column."""
    seen = torch.zeros(int(table.qo_indptr[-1]), num_columns, dtype=torch.int64)
    byte = 0
    for request, kv_len in enumerate(table.kv_len.tolist()):
        rows = slice(*table.qo_indptr[request : request + 2].tolist())
        pages = table.kv_indices[slice(*table.kv_indptr[request : request + 2].tolist())]
        page_offsets = torch.arange(table.page_size)
        columns = (pages[:, None].long() * table.page_size + page_offsets).flatten()
        assert len(columns) - table.page_size < kv_len <= len(columns) or kv_len == len(columns)
        qo_len = rows.stop - rows.start
        visible = torch.ones(qo_len, kv_len, dtype=torch.bool)
        if table.causal:
            visible = visible.tril(kv_len - qo_len)
        if table.packed_mask is not None:
            num_bytes = -(-qo_len * kv_len // 8)
            bits = table.packed_mask[byte : byte + num_bytes, None] >> torch.arange(8) & 1
            visible = bits.flatten()[: qo_len * kv_len].view(qo_len, kv_len).bool()
            byte += num_bytes
        seen[rows].index_add_(1, columns[:kv_len], visible.long())
    if table.packed_mask is not None:
        assert byte == len(table.packed_mask)
    return seen


def blocks_as_matrix(blocks: torch.Tensor, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    return blocks.repeat_interleave(rows, 0).repeat_interleave(cols, 1)


@st.composite
def bsr_matrices(draw):
    block = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 2, 3, 4, 8]))
    num_blocks = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    density = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    blocks = torch.rand(num_blocks, generator=generator) < density
    return blocks, block, draw(st.booleans()), draw(st.booleans())


@settings(max_examples=300, deadline=None)
@given(bsr_matrices())
def test_bsr_table_shows_the_matrix(matrix):
    blocks, (block_rows, block_cols), causal, backwards = matrix
    per_row = [row.nonzero().flatten() for row in blocks]
    indices = torch.cat([columns.flip(0) if backwards else columns for columns in per_row]).int()
    indptr = torch.tensor([0, *(len(c) for c in per_row)]).cumsum(0).int()
    num_rows, num_columns = blocks.shape[0] * block_rows, blocks.shape[1] * block_cols
    table = bsr_table(
        indptr, indices, (num_rows, num_columns), (block_rows, block_cols), causal, CPU
    )
    expected = blocks_as_matrix(blocks, torch.tensor(block_rows), torch.tensor(block_cols))
    if causal:
        expected = expected.tril(num_columns - num_rows)
    assert torch.equal(seen_through(table, num_columns), expected.long())
    assert table.page_size == block_cols


@st.composite
def variable_blocks(draw):
    heads, row_blocks, col_blocks = (draw(st.integers(1, n)) for n in (3, 5, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    unit = draw(st.sampled_from([1, 1, 4]))

    def sizes(count: int, total: int) -> torch.Tensor:
        cuts = torch.randint(0, total + 1, (heads, count - 1), generator=generator).sort(1).values
        ends = torch.nn.functional.pad(cuts, (0, 1), value=total)
        return torch.nn.functional.pad(ends, (1, 0)).diff(dim=1)

    rows, cols = sizes(row_blocks, draw(st.integers(0, 20))), sizes(col_blocks, 16) * unit
    density = draw(st.sampled_from([0.0, 0.4, 1.0]))
    blocks = torch.rand((heads, row_blocks, col_blocks), generator=generator) < density
    return blocks, rows, cols, draw(st.booleans())


@settings(max_examples=300, deadline=None)
@given(variable_blocks())
def test_variable_block_table_shows_the_matrix_of_each_head(matrix):
    blocks, rows, cols, causal = matrix
    num_heads, num_rows, num_columns = len(blocks), int(rows[0].sum()), int(cols[0].sum())
    table = variable_block_table(blocks, rows, cols, causal, CPU)
    assert num_columns % table.page_size == 0
    expected = torch.zeros(num_heads, num_rows, num_heads, num_columns, dtype=torch.bool)
    for head in range(num_heads):
        own = blocks_as_matrix(blocks[head], rows[head], cols[head])
        expected[head, :, head] = own.tril(num_columns - num_rows) if causal else own
    expected = expected.view(num_heads * num_rows, num_heads * num_columns)
    assert torch.equal(seen_through(table, num_heads * num_columns), expected.long())


def test_a_lower_triangle_needs_no_bits():
    blocks = torch.ones(4, 4).tril().bool()
    indptr = blocks.sum(1).cumsum(0)
    indptr = torch.nn.functional.pad(indptr, (1, 0)).int()
    indices = blocks.nonzero()[:, 1].int()
    for rows, cols in ((16, 16), (1, 16), (16, 8)):
        shape = (4 * rows, 4 * cols)
        table = bsr_table(indptr, indices, shape, (rows, cols), True, CPU)
        expected = blocks_as_matrix(blocks, torch.tensor(rows), torch.tensor(cols))
        expected = expected.tril(shape[1] - shape[0]).long()
        assert torch.equal(seen_through(table, shape[1]), expected)
        assert (table.packed_mask is None) == (rows <= cols)


def test_pages_are_as_large_as_the_blocks_allow():
    blocks = torch.ones(1, 1, 3, dtype=torch.bool)
    rows = torch.tensor([[5]])
    for sizes, page_size in (([64, 128, 192], 64), ([64, 0, 96], 32), ([5, 7, 9], 1), ([0] * 3, 1)):
        table = variable_block_table(blocks, rows, torch.tensor([sizes]), False, CPU)
        assert table.page_size == page_size


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 64])
def test_pack_bits(length):
    bits = torch.rand(length) < 0.5
    packed = pack_bits(bits)
    assert packed.dtype == torch.uint8 and len(packed) == -(-length // 8)
    unpacked = (packed[:, None] >> torch.arange(8) & 1).flatten()
    assert torch.equal(unpacked[:length].bool(), bits)
    assert not unpacked[length:].any()
