"""LoRA in mixtures of experts: the names of FlashInfer, with tensors or with tables of addresses.

A table has an address for each expert: that of its matrix of the first adapter. Kernels here do not
follow addresses. `fill_w_ptr` notes which weights a table stands for, and the functions that take
tables compute with these tensors, or refuse the table.
"""

from __future__ import annotations

import torch

from .._common import checks
from .._common.arch import get_compute_capability
from .._instrument.decorator import flashinfer_api
from .._moe import tables
from .adapters import (
    check_pairs,
    check_ranks,
    check_shape,
    check_weights,
    expand_pairs,
    shrink_pairs,
)


def has_bgmv_moe() -> bool:
    """Whether the current GPU has the kernels of `bgmv_moe`: a Hopper."""
    if not torch.cuda.is_available():
        return False
    return get_compute_capability(torch.device("cuda", torch.cuda.current_device())) == (9, 0)


@flashinfer_api
def fill_w_ptr(w_ptr: torch.Tensor, weights: torch.Tensor, num_experts: int, slice_id: int) -> int:
    """Let a slice of a table stand for the weights of all adapters and experts.

    The table keeps them alive. It may be a view of another tensor, and views of its slices are
    tables, too; a copy is none, and what others write into it undoes it.

    Parameters
    ----------
    w_ptr : torch.Tensor
        ``[slices, num_experts]``, or ``[num_experts]`` for a single slice, int64, contiguous:
        receives the addresses of the first adapter's matrices.
    weights : torch.Tensor
        ``[adapters, num_experts, rows, columns]``, contiguous, bfloat16 or float16, on the device
        of `w_ptr`. What is written to them later counts.
    num_experts : int
        Experts.
    slice_id : int
        The slice.

    Returns
    -------
    int
        Elements from one adapter to the next: the stride that goes with the table.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    num_experts = checks.count("num_experts", num_experts)
    slices = tables.check("w_ptr", w_ptr, num_experts)
    slice_id = checks.count("slice_id", slice_id, 0, slices - 1)
    checks.contiguous("weights", weights, 4)
    checks.dtype("weights", weights.dtype, (torch.bfloat16, torch.float16))
    if weights.shape[1] != num_experts or weights.numel() == 0:
        raise ValueError(
            f"`weights` must be [adapters, {num_experts}, rows, columns], got {list(weights.shape)}"
        )
    if weights.device != w_ptr.device:
        raise ValueError(f"`weights` must be on {w_ptr.device}, got one on {weights.device}")
    tables.fill(w_ptr, weights, slice_id)
    return weights.stride(0)


def find_weights(
    name: str, table: torch.Tensor, stride_name: str, stride: int
) -> list[torch.Tensor]:
    """The weights of a table, whose stride between adapters is what the caller says."""
    weights = tables.weights_of(name, table)
    for weight in weights:
        if checks.count(stride_name, stride, 0, 2**62) != weight.stride(0):
            raise ValueError(
                f"`{stride_name}` must be {weight.stride(0)} as fill_w_ptr gave it for `{name}`, "
                f"got {stride}"
            )
    return weights


@flashinfer_api
def bgmv_moe_shrink(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    lora_stride: int,
    *,
    per_pair_input: bool = False,
) -> None:
    """``y[s, p] += A x``: the first product of LoRA for pairs of tokens and experts.

    x is the row of pair p's token and A the matrix of its token's adapter and its expert; see
    `flashinfer.fused_moe.adapters.shrink_pairs`, which takes the tensors themselves.

    Parameters
    ----------
    y : torch.Tensor
        ``[slices, pairs, rank]``, float32: is added to.
    x : torch.Tensor
        ``[tokens, hidden]``, bfloat16 or float16, rows contiguous, on a Hopper GPU.
    w_ptr : torch.Tensor
        ``[slices, experts]``, int64: a table that `fill_w_ptr` has filled with
        ``[adapters, experts, rank, hidden]``, dtype of `x`.
    sorted_token_ids, expert_ids : torch.Tensor
        ``[pairs]``, int32 or int64, in any order. Numbers that do not exist add nothing.
    lora_indices : torch.Tensor
        ``[tokens]``, int32 or int64: adapters; -1 and others that do not exist add nothing.
    lora_stride : int
        The stride that `fill_w_ptr` gave.
    per_pair_input : bool
        `x` is ``[pairs, hidden]``: a row for each pair.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above, or the table does not stand for weights.
    """
    weights = find_weights("w_ptr", w_ptr, "lora_stride", lora_stride)
    shrink_pairs(y, x, weights, sorted_token_ids, expert_ids, lora_indices, per_pair_input)


@flashinfer_api
def bgmv_moe_expand(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_indices: torch.Tensor,
    slice_start_loc: torch.Tensor,
    output_slices: list[int],
    lora_stride: int,
    *,
    finalize: bool = True,
) -> None:
    """``y[t] += sum_p topk_weights[p] B x[s, p]`` over the pairs p of each token t.

    B is the matrix of the token's adapter and the pair's expert; see
    `flashinfer.fused_moe.adapters.expand_pairs`, which takes the tensors themselves.

    Parameters
    ----------
    y : torch.Tensor
        ``[tokens, columns]``, float32: slice s is added to its columns.
    x : torch.Tensor
        ``[slices, pairs, rank]``, float32, bfloat16 or float16, on a Hopper GPU: is rounded to the
        weights' dtype.
    w_ptr : torch.Tensor
        ``[slices, experts]``, int64: a table that `fill_w_ptr` has filled with
        ``[adapters, experts, columns of the slice, rank]``.
    sorted_token_ids, expert_ids : torch.Tensor
        ``[pairs]``, int32 or int64, in any order. Numbers that do not exist add nothing.
    topk_weights : torch.Tensor
        ``[pairs]``, float32.
    lora_indices : torch.Tensor
        ``[tokens]``, int32 or int64: adapters; -1 and others that do not exist add nothing.
    slice_start_loc : torch.Tensor
        ``[slices]``, int32 or int64: each slice's first column.
    output_slices : list of int
        Columns of each slice.
    lora_stride : int
        The stride that `fill_w_ptr` gave. Slices of different widths have no common one and are
        refused.
    finalize : bool
        False: `y` is ``[pairs, columns]``, and each pair's product is added without its weight.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above, or the table does not stand for weights.
    """
    weights = find_weights("w_ptr", w_ptr, "lora_stride", lora_stride)
    widths = [weight.shape[2] for weight in weights]
    if list(output_slices) != widths:
        raise ValueError(f"`output_slices` must be {widths} as `w_ptr` has, got {output_slices}")
    expand_pairs(
        y,
        x,
        weights,
        sorted_token_ids,
        expert_ids,
        topk_weights,
        lora_indices,
        slice_start_loc,
        finalize,
    )


def check_call(
    x: torch.Tensor,
    lora_a_weights: list[torch.Tensor],
    lora_b_weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
) -> list[int]:
    """Everything about a call of `bgmv_moe`, before either product; the slices' columns."""
    check_weights("lora_a_weights", lora_a_weights)
    check_ranks("lora_a_weights", lora_a_weights)
    check_weights("lora_b_weights", lora_b_weights)
    adapters, experts, rank, hidden = lora_a_weights[0].shape
    if checks.count("num_experts", num_experts) != experts:
        raise ValueError(
            f"`num_experts` must be {experts} as in `lora_a_weights`, got {num_experts}"
        )
    if len(lora_b_weights) != len(lora_a_weights):
        raise ValueError(
            f"`lora_b_weights` must have {len(lora_a_weights)} tensors as `lora_a_weights` has, "
            f"got {len(lora_b_weights)}"
        )
    columns = [weight.shape[2] for weight in lora_b_weights]
    check_shape("lora_b_weights[0]", lora_b_weights[0], (adapters, experts, columns[0], rank))
    check_pairs(sorted_token_ids, expert_ids, lora_indices)
    check_shape("x", x, (lora_indices.shape[0], hidden))
    check_shape("topk_weights", topk_weights, tuple(sorted_token_ids.shape))
    checks.dtype("topk_weights", topk_weights.dtype, (torch.float32,))
    for name, weights in (("lora_a_weights", lora_a_weights), ("lora_b_weights", lora_b_weights)):
        checks.dtype(f"{name}[0]", weights[0].dtype, (x.dtype,))
    return columns


def slice_starts(columns: list[int], device: torch.device) -> torch.Tensor:
    """First columns of slices that lie side by side; no copy from the host, which graphs refuse."""
    starts = torch.zeros(len(columns), dtype=torch.int64, device=device)
    for s, width in enumerate(columns):
        starts[s + 1 :] += width
    return starts


@flashinfer_api
def bgmv_moe(
    x: torch.Tensor,
    lora_a_weights: list[torch.Tensor],
    lora_b_weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    output_dim: int | None = None,
) -> torch.Tensor:
    """The delta of LoRA adapters in a mixture: each token's adapter, each pair's expert.

    ``delta[t] = sum_p topk_weights[p] B (A x[t])`` over the pairs p of token t, with the matrices
    A and B of its adapter and the pair's expert; slices lie side by side. The rows between the
    products, and the products, are rounded to the dtype of `x`; sums are in float32 and have a
    fixed order, so that equal calls give equal bits.

    Parameters
    ----------
    x : torch.Tensor
        ``[tokens, hidden]``, bfloat16 or float16, rows contiguous, on a Hopper GPU.
    lora_a_weights : list of torch.Tensor
        For each slice ``[adapters, num_experts, rank, hidden]``, contiguous, dtype of `x`. rank and
        hidden are multiples of 8.
    lora_b_weights : list of torch.Tensor
        For each slice ``[adapters, num_experts, columns, rank]``, contiguous, dtype of `x`. columns
        are a multiple of 8.
    sorted_token_ids, expert_ids : torch.Tensor
        ``[pairs]``, int32 or int64, in any order. Numbers that do not exist add nothing.
    lora_indices : torch.Tensor
        ``[tokens]``, int32 or int64: adapters; -1 and others that do not exist add nothing.
    topk_weights : torch.Tensor
        ``[pairs]``, float32.
    num_experts : int
        Experts; at most 1024.
    output_dim : int, optional
        Columns of the result, which are those of all slices.

    Returns
    -------
    torch.Tensor
        ``[tokens, output_dim]``, dtype of `x`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.

    Notes
    -----
    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    columns = check_call(
        x,
        lora_a_weights,
        lora_b_weights,
        sorted_token_ids,
        expert_ids,
        lora_indices,
        topk_weights,
        num_experts,
    )
    if output_dim is not None and checks.count("output_dim", output_dim) != sum(columns):
        raise ValueError(f"`output_dim` must be {sum(columns)}, got {output_dim}")
    shape = len(lora_a_weights), sorted_token_ids.shape[0], lora_a_weights[0].shape[2]
    between = torch.zeros(shape, dtype=torch.float32, device=x.device)
    delta = torch.zeros(x.shape[0], sum(columns), dtype=torch.float32, device=x.device)
    pairs = sorted_token_ids, expert_ids
    shrink_pairs(between, x, lora_a_weights, *pairs, lora_indices)
    starts = slice_starts(columns, x.device)
    expand_pairs(delta, between, lora_b_weights, *pairs, topk_weights, lora_indices, starts)
    return delta.to(x.dtype)
