"""Products of (token, expert) pairs with the matrices of their adapters and experts.

Pairs are sorted by matrix into a map of rows, a grouped product reads its rows through the map, and
`combine` puts the results back into the order of the pairs. A product takes 1024 matrices at most,
so adapters come in parts. All of a token's pairs are in one part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..gemm._choice import GemmProblem
from ..gemm._launch import launch
from .maps import RowMap, combine, map_rows

MAX_MATRICES = 1024


def find_matrices(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    adapters: torch.Tensor,
    num_adapters: int,
    num_experts: int,
) -> torch.Tensor:
    """The matrix of each pair, ``[pairs]``, int32: ``adapter * num_experts + expert``, or -1.

    A pair has none if its token, its expert or its token's adapter does not exist.
    """
    exists = (tokens >= 0) & (tokens < adapters.shape[0])
    adapter = adapters.index_select(0, torch.where(exists, tokens, 0))
    exists &= (adapter >= 0) & (adapter < num_adapters)
    exists &= (experts >= 0) & (experts < num_experts)
    return torch.where(exists, adapter * num_experts + experts, -1).to(torch.int32)


@dataclass(frozen=True)
class Part:
    """Adapters that are neighbours: their matrices, and the map of the pairs that have one."""

    matrices: slice
    rows: RowMap

    @classmethod
    def of_pairs(cls, matrix: torch.Tensor, num_adapters: int, num_experts: int) -> list[Part]:
        """All parts, for the matrices that `find_matrices` found."""
        step = MAX_MATRICES // num_experts * num_experts
        total = num_adapters * num_experts
        bounds = [(first, min(first + step, total)) for first in range(0, total, step)]
        return [
            cls(slice(first, last), map_rows(matrix[:, None], first, last - first))
            for first, last in bounds
        ]


def multiply(
    parts: list[Part],
    x: torch.Tensor,
    source: torch.Tensor,
    weights: torch.Tensor,
    factor: torch.Tensor,
) -> torch.Tensor:
    """``factor[p] * (x[source[p]] @ W.T)`` for each pair p and its matrix W; zeros without one.

    Parameters
    ----------
    parts : list of Part
        The pairs.
    x : torch.Tensor
        ``[rows, k]``, bfloat16 or float16.
    source : torch.Tensor
        ``[pairs]``, int32: the row that each pair reads.
    weights : torch.Tensor
        ``[adapters, experts, columns, k]``, contiguous, dtype of `x`.
    factor : torch.Tensor
        ``[pairs]``, float32.

    Returns
    -------
    torch.Tensor
        ``[pairs, columns]``, float32: products, rounded to the dtype of `x`, times factors.
    """
    pairs, (columns, k) = source.shape[0], weights.shape[2:]
    result: torch.Tensor | None = None
    for part in parts:
        matrices = weights.view(-1, columns, k)[part.matrices]
        # The map is undefined after its last row.
        pair = part.rows.row_token.clamp(0, pairs - 1)
        index = source.index_select(0, pair)
        products = x.new_empty((pairs, columns))
        problem = GemmProblem(
            x.dtype,
            matrices.dtype,
            products.dtype,
            rows=pairs,
            columns=columns,
            k=k,
            batches=matrices.shape[0],
            groups="offsets",
            gathers=True,
            routed=True,
        )
        rows = (part.rows.offsets, None, index, None)
        launch(problem, "x", products, x, matrices, rows=rows)
        own = x.new_empty((pairs, columns), dtype=torch.float32)
        combine(own, products, part.rows.entry_row, factor[:, None])
        result = own if result is None else result.add_(own)
    assert result is not None
    return result


def sum_by_token(rows: torch.Tensor, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """``[num_tokens, columns]``: the sums of each token's rows, in their order.

    Parameters
    ----------
    rows : torch.Tensor
        ``[pairs, columns]``, float32.
    tokens : torch.Tensor
        ``[pairs]``: sorted; rows of tokens from `num_tokens` on count nothing.
    """
    ends = torch.arange(num_tokens + 1, device=tokens.device, dtype=tokens.dtype)
    offsets = torch.searchsorted(tokens, ends)
    # One thread adds up a column of a token's rows; the lengths are not looked at.
    return torch.segment_reduce(rows, "sum", offsets=offsets, axis=0, unsafe=True)
