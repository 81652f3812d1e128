"""Deltas of LoRA adapters for a mixture's first product and for its result."""

from __future__ import annotations

import torch

from .._common import checks
from .._common.dtypes import FLOAT
from .._instrument.decorator import flashinfer_api
from .adapters import check_shape, expand_pairs, shrink_pairs
from .bgmv_moe import find_weights, slice_starts

_HALF = (torch.bfloat16, torch.float16)
_INDEX = (torch.int32, torch.int64)

Tables = tuple[tuple[torch.Tensor, int], tuple[torch.Tensor, int]]


def _find_both(
    tables: Tables, slices: int, lora_dtype: torch.dtype, rank: int, columns: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The weights of both tables, which have as many slices; columns are those of all of them."""
    checks.dtype("lora_dtype", lora_dtype, _HALF)
    checks.count("rank", rank)
    found = []
    for letter, (table, stride) in zip("ab", tables, strict=True):
        name = f"w_ptr_{letter}"
        weights = find_weights(name, table, f"lora_stride_{letter}", stride)
        if len(weights) != slices:
            raise ValueError(f"`{name}` must have {slices} slices, got {list(table.shape)}")
        for weight in weights:
            if weight.dtype != lora_dtype:
                raise ValueError(
                    f"`lora_dtype` must be {weight.dtype} as the weights of `{name}`, got "
                    f"{lora_dtype}"
                )
            if weight.shape[2 if letter == "a" else 3] != rank:
                raise ValueError(
                    f"`rank` must be that of the weights of `{name}`, {list(weight.shape)}, "
                    f"got {rank}"
                )
        found.append(weights)
    first, second = found
    widths = [weight.shape[2] for weight in second]
    if sum(widths) != columns or len(set(widths)) != 1 or first[0].shape[:2] != second[0].shape[:2]:
        raise ValueError(
            f"`w_ptr_b` must stand for {slices} weights of {first[0].shape[0]} adapters and "
            f"{first[0].shape[1]} experts with {columns} columns together, got "
            f"{[list(weight.shape) for weight in second]}"
        )
    return first, second


def _check_choices(topk_ids: torch.Tensor, lora_ids: torch.Tensor) -> None:
    checks.tensor("topk_ids", topk_ids, 2)
    checks.dtype("topk_ids", topk_ids.dtype, _INDEX)
    check_shape("lora_ids", lora_ids, tuple(topk_ids.shape[:1]))
    checks.dtype("lora_ids", lora_ids.dtype, _INDEX)


def _tokens(topk_ids: torch.Tensor) -> torch.Tensor:
    """The token of each choice."""
    tokens, top_k = topk_ids.shape
    numbers = torch.arange(tokens, device=topk_ids.device)
    return numbers[:, None].expand(tokens, top_k).reshape(-1)


@flashinfer_api
def bgmv_moe_gemm1_lora_delta(
    hidden_states: torch.Tensor,
    w_ptr_a: torch.Tensor,
    lora_stride_a: int,
    w_ptr_b: torch.Tensor,
    lora_stride_b: int,
    topk_ids: torch.Tensor,
    lora_ids: torch.Tensor,
    rank: int,
    intermediate_size: int,
    *,
    lora_dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The delta of adapters for the gates and values of each token's chosen experts.

    ``delta[t, j] = scale * [B_gate (A_gate x[t]), B_up (A_up x[t])]`` with the matrices of expert
    ``topk_ids[t, j]`` and adapter ``lora_ids[t]``. It is added before the activation, so it has no
    weights of the router. Roundings are those of `bgmv_moe_shrink` and `bgmv_moe_expand`.

    Parameters
    ----------
    hidden_states : torch.Tensor
        ``[tokens, hidden]``, bfloat16, float16 or float32, on a Hopper GPU: is rounded to
        `lora_dtype`.
    w_ptr_a, w_ptr_b : torch.Tensor
        ``[2, experts]``, int64: tables of `fill_w_ptr`, gates first, of
        ``[adapters, experts, rank, hidden]`` and ``[adapters, experts, intermediate, rank]``. Or
        both ``[experts]``: one first matrix for gates and values, and one second matrix of
        ``2 * intermediate`` rows.
    lora_stride_a, lora_stride_b : int
        The strides that `fill_w_ptr` gave.
    topk_ids : torch.Tensor
        ``[tokens, top_k]``, int32 or int64: experts; numbers that do not exist get zeros.
    lora_ids : torch.Tensor
        ``[tokens]``, int32 or int64: adapters; -1 and others that do not exist get zeros.
    rank, intermediate_size : int
        Sizes of the weights.
    lora_dtype : torch.dtype
        bfloat16 or float16: that of the weights.
    scale : float
        A factor of the result.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.

    Returns
    -------
    torch.Tensor
        ``[tokens, top_k, 2 * intermediate_size]``, `out_dtype`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above, or a table does not stand for weights.

    Notes
    -----
    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    _check_choices(topk_ids, lora_ids)
    columns = 2 * checks.count("intermediate_size", intermediate_size)
    slices = 1 if checks.tensor("w_ptr_a", w_ptr_a, 1, 2).ndim == 1 else 2
    if checks.tensor("w_ptr_b", w_ptr_b, 1, 2).ndim != w_ptr_a.ndim:
        raise ValueError(
            f"`w_ptr_b` must have {w_ptr_a.ndim} dimensions as `w_ptr_a` has, got "
            f"{list(w_ptr_b.shape)}"
        )
    tables = (w_ptr_a, lora_stride_a), (w_ptr_b, lora_stride_b)
    first, second = _find_both(tables, slices, lora_dtype, rank, columns)
    check_shape("hidden_states", hidden_states, (topk_ids.shape[0], first[0].shape[3]))
    checks.dtype("hidden_states", hidden_states.dtype, FLOAT)
    checks.dtype("out_dtype", out_dtype, FLOAT)
    scale = checks.number("scale", scale)
    pairs = _tokens(topk_ids), topk_ids.reshape(-1)
    count = pairs[0].shape[0]
    between = hidden_states.new_zeros((slices, count, rank), dtype=torch.float32)
    shrink_pairs(between, hidden_states.to(lora_dtype), first, *pairs, lora_ids)
    delta = hidden_states.new_zeros((count, columns), dtype=torch.float32)
    starts = slice_starts([weight.shape[2] for weight in second], delta.device)
    ones = delta.new_ones(count)
    expand_pairs(delta, between, second, *pairs, ones, lora_ids, starts, finalize=False)
    return delta.mul_(scale).to(out_dtype).view(*topk_ids.shape, columns)


@flashinfer_api
def bgmv_moe_gemm2_lora_delta(
    gemm1_activation_output: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    w_ptr_a: torch.Tensor,
    lora_stride_a: int,
    w_ptr_b: torch.Tensor,
    lora_stride_b: int,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_ids: torch.Tensor,
    rank: int,
    hidden_size: int,
    *,
    lora_dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The delta of adapters for the result of a mixture, from the rows between its products.

    ``delta[t] = scale * sum_j topk_weights[t, j] * B (A a[t, j])`` with the matrices of expert
    ``topk_ids[t, j]`` and adapter ``lora_ids[t]``, and the activated row a of the choice. Roundings
    are those of `bgmv_moe_shrink` and `bgmv_moe_expand`; sums have the order of the choices.

    Parameters
    ----------
    gemm1_activation_output : torch.Tensor
        ``[rows, intermediate]``, bfloat16, float16 or float32, on a Hopper GPU: is rounded to
        `lora_dtype`.
    expanded_idx_to_permuted_idx : torch.Tensor
        ``[tokens * top_k]``, int32 or int64: the row of each choice; numbers that do not exist,
        such as -1, add nothing.
    w_ptr_a, w_ptr_b : torch.Tensor
        ``[1, experts]`` or ``[experts]``, int64: tables of `fill_w_ptr`, of
        ``[adapters, experts, rank, intermediate]`` and ``[adapters, experts, hidden, rank]``.
    lora_stride_a, lora_stride_b : int
        The strides that `fill_w_ptr` gave.
    topk_ids : torch.Tensor
        ``[tokens, top_k]``, int32 or int64: experts; numbers that do not exist add nothing.
    topk_weights : torch.Tensor
        ``[tokens, top_k]``, bfloat16, float16 or float32.
    lora_ids : torch.Tensor
        ``[tokens]``, int32 or int64: adapters; -1 and others that do not exist add nothing.
    rank, hidden_size : int
        Sizes of the weights.
    lora_dtype : torch.dtype
        bfloat16 or float16: that of the weights.
    scale : float
        A factor of the result.
    out_dtype : torch.dtype
        bfloat16, float16 or float32.

    Returns
    -------
    torch.Tensor
        ``[tokens, hidden_size]``, `out_dtype`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above, or a table does not stand for weights.

    Notes
    -----
    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    _check_choices(topk_ids, lora_ids)
    check_shape("topk_weights", topk_weights, tuple(topk_ids.shape))
    checks.dtype("topk_weights", topk_weights.dtype, FLOAT)
    index = expanded_idx_to_permuted_idx
    check_shape("expanded_idx_to_permuted_idx", index, (topk_ids.numel(),))
    checks.dtype("expanded_idx_to_permuted_idx", index.dtype, _INDEX)
    tables = (w_ptr_a, lora_stride_a), (w_ptr_b, lora_stride_b)
    first, second = _find_both(
        tables, 1, lora_dtype, rank, checks.count("hidden_size", hidden_size)
    )
    activated = checks.tensor("gemm1_activation_output", gemm1_activation_output, 2)
    check_shape("gemm1_activation_output", activated, (activated.shape[0], first[0].shape[3]))
    checks.dtype("gemm1_activation_output", activated.dtype, FLOAT)
    checks.dtype("out_dtype", out_dtype, FLOAT)
    scale = checks.number("scale", scale)
    delta = activated.new_zeros((topk_ids.shape[0], hidden_size), dtype=torch.float32)
    if activated.shape[0] > 0:
        exists = (index >= 0) & (index < activated.shape[0])
        rows = activated.index_select(0, torch.where(exists, index, 0)).to(lora_dtype)
        pairs = _tokens(topk_ids), torch.where(exists, topk_ids.reshape(-1), -1)
        between = delta.new_zeros((1, index.shape[0], rank))
        shrink_pairs(between, rows, first, *pairs, lora_ids, per_pair_input=True)
        factors = topk_weights.reshape(-1).float() * scale
        starts = slice_starts([hidden_size], delta.device)
        expand_pairs(delta, between, second, *pairs, factors, lora_ids, starts)
    return delta.to(out_dtype)
