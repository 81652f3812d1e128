"""Orders of weights of mixtures, element by element."""

from __future__ import annotations

import pytest
import torch

from flashinfer.fused_moe import convert_to_block_layout, reorder_rows_for_gated_act_gemm


def test_blocks_of_columns() -> None:
    x = torch.arange(5 * 12).view(5, 12)
    blocks = convert_to_block_layout(x, 4)
    assert blocks.shape == (3, 5, 4) and blocks.is_contiguous()
    for b in range(3):
        assert torch.equal(blocks[b], x[:, 4 * b : 4 * b + 4])


def test_rows_take_turns() -> None:
    x = torch.randn(6, 3)
    assert torch.equal(reorder_rows_for_gated_act_gemm(x), x[[0, 3, 1, 4, 2, 5]])
    codes = torch.randint(0, 255, (4, 3), dtype=torch.uint8)
    assert torch.equal(reorder_rows_for_gated_act_gemm(codes), codes[[0, 2, 1, 3]])


@pytest.mark.parametrize("block", [5, 0, -4, 4.0])
def test_blocks_that_do_not_divide_are_refused(block: float) -> None:
    with pytest.raises((TypeError, ValueError), match="blockK"):
        convert_to_block_layout(torch.zeros(2, 12), block)  # type: ignore[arg-type]


def test_odd_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="`x` must have an even number of rows"):
        reorder_rows_for_gated_act_gemm(torch.zeros(3, 4))
