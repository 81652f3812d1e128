"""Tiles of the portable kernel for a batch."""

from __future__ import annotations

from ..jit.attention.config import choose_tile_q
from .problem import AttentionProblem

PORTABLE_TILE_KV = 64  # tokens


def tile_q_of(problem: AttentionProblem, fixed_split_size: bool, small: int) -> int:
    """Tile of the requests that have more than `small` packed rows."""
    group = problem.num_qo_heads // problem.num_kv_heads
    if problem.qo_indptr is None:
        rows = problem.tokens_per_request * group
        return choose_tile_q(rows, rows, problem.head_dim_vo)
    indptr = problem.qo_indptr.numpy()
    if len(indptr) < 2:
        return choose_tile_q(0, 0, problem.head_dim_vo, fixed_split_size)
    mean = int(indptr[-1]) * group / (len(indptr) - 1)
    if not small and mean > 16:  # the longest would decide nothing more
        return choose_tile_q(mean, mean, problem.head_dim_vo, fixed_split_size)
    lengths = indptr[1:] - indptr[:-1]
    if small:
        lengths = lengths[lengths > small // group]
        if not len(lengths):
            return small
        mean = int(lengths.sum()) * group / len(lengths)
    longest = int(lengths.max()) * group
    return choose_tile_q(longest, mean, problem.head_dim_vo, fixed_split_size)
