"""Which expert gets which rows, and the way back: launches of csrc/moe_*.cu."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .._common.dtypes import check_dtype
from .._common.kernels import Kernel
from ..jit.moe import (
    EXPERTS_PER_LANE,
    MoeCombineConfig,
    MoeHashConfig,
    MoeMapConfig,
    MoeRouteConfig,
    gen_moe_combine_module,
    gen_moe_hash_module,
    gen_moe_map_module,
    gen_moe_route_module,
)


@functools.cache
def _route_kernel(config: MoeRouteConfig) -> Kernel:
    return gen_moe_route_module(config).build_and_load().moe_route


def _index(name: str, dtype: torch.dtype) -> str:
    """The name of a type of indices in a configuration."""
    check_dtype(name, dtype, (torch.int32, torch.int64))
    return "int64" if dtype == torch.int64 else "int32"


@functools.cache
def _hash_kernel(dtype: torch.dtype, ids: torch.dtype, table: torch.dtype) -> Kernel:
    config = MoeHashConfig(dtype, _index("input_ids", ids), _index("tid2eid", table))
    return gen_moe_hash_module(config).build_and_load().moe_hash


@functools.cache
def _map_kernel(dtype: torch.dtype) -> Kernel:
    config = MoeMapConfig(_index("token_selected_experts", dtype))
    return gen_moe_map_module(config).build_and_load().moe_map


@functools.cache
def _combine_kernel(dtype: torch.dtype, dtype_out: torch.dtype) -> Kernel:
    return gen_moe_combine_module(MoeCombineConfig(dtype, dtype_out)).build_and_load().moe_combine


def route(
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    *,
    score: str,
    groups: tuple[int, int] = (1, 1),
    renormalize: bool = True,
    scale: float = 1.0,
    enable_pdl: bool | None = None,
) -> None:
    """Choose the experts of each token.

    Parameters
    ----------
    scores : torch.Tensor
        ``[tokens, experts]``, float32, float16 or bfloat16: the router's logits, at most 1024.
    bias : torch.Tensor, optional
        ``[experts]``, float32: added to the scores for the choice alone.
    topk_values, topk_indices : torch.Tensor
        ``[tokens, top_k]``, float32 and int32: receive weights and experts, from the best one on.
    score : {"softmax", "sigmoid"}
        How logits become scores.
    groups : (int, int)
        Groups of neighbouring experts and how many of them are kept: those whose two best experts
        have the largest sum.
    renormalize : bool
        The weights of a token sum to `scale`.
    scale : float
        A factor of all weights.
    enable_pdl : bool, optional
        Programmatic dependent launch; None takes it where the device has it.
    """
    lanes = -(-scores.shape[-1] // 32)
    experts_per_lane = next((n for n in EXPERTS_PER_LANE if n >= lanes), EXPERTS_PER_LANE[-1])
    kernel = _route_kernel(MoeRouteConfig(scores.dtype, score, experts_per_lane))
    kernel(topk_values, topk_indices, scores, bias, groups, renormalize, float(scale), enable_pdl)


def route_by_table(
    logits: torch.Tensor,
    ids: torch.Tensor,
    table: torch.Tensor,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts, ``[tokens, top_k]``: those that ``table[ids]`` names."""
    shape = ids.shape[0], table.shape[1]
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    kernel = _hash_kernel(logits.dtype, ids.dtype, table.dtype)
    kernel(weights, experts, logits, ids, table, enable_pdl)
    return weights, experts


@dataclass(frozen=True)
class RowMap:
    """The rows of grouped products: sorted by expert, for one expert in the order of tokens.

    Attributes
    ----------
    offsets : torch.Tensor
        ``[experts + 1]``, int32: expert e has rows ``offsets[e]`` to ``offsets[e + 1]``.
    row_token : torch.Tensor
        ``[tokens * top_k]``, int32: the token of each row; nothing after the last row.
    entry_row : torch.Tensor
        ``[tokens, top_k]``, int32: the row of each choice, -1 where its expert is elsewhere.
    """

    offsets: torch.Tensor
    row_token: torch.Tensor
    entry_row: torch.Tensor

    @classmethod
    def empty(cls, experts: torch.Tensor, num_experts: int) -> RowMap:
        """Memory for the map of ``[tokens, top_k]`` choices."""
        return cls(
            experts.new_empty(num_experts + 1, dtype=torch.int32),
            experts.new_empty(experts.numel(), dtype=torch.int32),
            experts.new_empty(experts.shape, dtype=torch.int32),
        )


def map_rows(
    experts: torch.Tensor,
    first_expert: int,
    num_experts: int,
    enable_pdl: bool | None = None,
    out: RowMap | None = None,
) -> RowMap:
    """The map of ``[tokens, top_k]`` choices (int32 or int64) to the experts that are here.

    Experts `first_expert` to ``first_expert + num_experts - 1`` are here. Other numbers, negative
    ones too, get no row.
    """
    result = out or RowMap.empty(experts, num_experts)
    kernel = _map_kernel(experts.dtype)
    kernel(result.offsets, result.row_token, result.entry_row, experts, first_expert, enable_pdl)
    return result


def combine(
    out: torch.Tensor,
    rows: torch.Tensor,
    entry_row: torch.Tensor,
    scales: torch.Tensor,
    enable_pdl: bool | None = None,
    *,
    starts_early: bool = False,
) -> None:
    """Sum ``scales[t, j] * rows[entry_row[t, j]]`` over j into ``out[t]``, in order of j.

    `starts_early`: the previous kernel writes `rows` alone, and what it follows has finished.
    """
    kernel = _combine_kernel(rows.dtype, out.dtype)
    kernel(out, rows, entry_row, scales, starts_early, enable_pdl)
