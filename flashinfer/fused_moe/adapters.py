"""LoRA in mixtures of experts: both products of pairs of tokens and experts, from tensors.

`bgmv_moe` calls them, and so do the functions that take tables of addresses.
"""

import torch

from .._common import checks
from .._instrument.decorator import flashinfer_api
from .._moe.adapters import MAX_MATRICES, Part, find_matrices, multiply, sum_by_token
from ..compat.backends import backend_requirement, supported_compute_capability
from ..trace.templates.moe_adapters import expand_pairs_trace, shrink_pairs_trace

__all__ = ["expand_pairs", "shrink_pairs"]

_HALF = (torch.bfloat16, torch.float16)
_INDEX = (torch.int32, torch.int64)
_MULTIPLE = 8
_SUPPORTED = [90]


def check_weights(argument: str, weights: list[torch.Tensor]) -> None:
    """Matrices of all slices: their adapters, experts and k are the same."""
    if not isinstance(weights, (list, tuple)) or not weights:
        raise TypeError(f"`{argument}` must be a list of tensors, got {type(weights).__name__}")
    for i, weight in enumerate(weights):
        name = f"{argument}[{i}]"
        checks.contiguous(name, weight, 4)
        checks.dtype(name, weight.dtype, _HALF if i == 0 else (weights[0].dtype,))
        adapters, experts, columns, k = weight.shape
        if 0 in weight.shape or columns % _MULTIPLE or k % _MULTIPLE or experts > MAX_MATRICES:
            raise ValueError(
                f"`{name}` must be [adapters, experts, columns, k] with at most {MAX_MATRICES} "
                f"experts and multiples of {_MULTIPLE} columns and k, got {list(weight.shape)}"
            )
        if (adapters, experts, k) != (*weights[0].shape[:2], weights[0].shape[3]):
            raise ValueError(
                f"`{name}` must have the adapters, experts and k of the first one, "
                f"{list(weights[0].shape)}, got {list(weight.shape)}"
            )
        if adapters * experts >= 2**31:
            raise ValueError(
                f"`{name}` must have less than 2^31 matrices, got {adapters * experts}"
            )


def check_ranks(argument: str, weights: list[torch.Tensor]) -> None:
    """First matrices of all slices have the same rank."""
    for i, weight in enumerate(weights):
        if weight.shape[2] != weights[0].shape[2]:
            raise ValueError(
                f"`{argument}[{i}]` must have rank {weights[0].shape[2]}, got {list(weight.shape)}"
            )


def check_pairs(tokens: torch.Tensor, experts: torch.Tensor, adapters: torch.Tensor) -> None:
    given = {"sorted_token_ids": tokens, "expert_ids": experts, "lora_indices": adapters}
    for name, tensor in given.items():
        checks.tensor(name, tensor, 1)
        checks.dtype(name, tensor.dtype, _INDEX)
    if experts.shape != tokens.shape:
        raise ValueError(
            f"`expert_ids` must have shape {list(tokens.shape)}, got {list(experts.shape)}"
        )


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    checks.tensor(name, tensor)
    if tensor.shape != shape:
        raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(tensor.shape)}")


def _check_cuda(
    weights: list[torch.Tensor],
    y: torch.Tensor,
    x: torch.Tensor,
    tokens: torch.Tensor,
    experts: torch.Tensor,
    adapters: torch.Tensor,
) -> None:
    pairs = {"sorted_token_ids": tokens, "expert_ids": experts, "lora_indices": adapters}
    matrices = {f"weights[{i}]": weight for i, weight in enumerate(weights)}
    checks.cuda_tensors(y=y, x=x, **pairs, **matrices)


@supported_compute_capability(_SUPPORTED)
def _check_shrink(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    per_pair_input: bool,
) -> bool:
    check_weights("weights", weights)
    check_pairs(sorted_token_ids, expert_ids, lora_indices)
    check_ranks("weights", weights)
    pairs, (rank, k) = sorted_token_ids.shape[0], weights[0].shape[2:]
    rows = pairs if checks.flag("per_pair_input", per_pair_input) else lora_indices.shape[0]
    check_shape("x", x, (rows, k))
    checks.dtype("x", x.dtype, (weights[0].dtype,))
    check_shape("y", y, (len(weights), pairs, rank))
    checks.dtype("y", y.dtype, (torch.float32,))
    return True


@backend_requirement({}, common_check=_check_shrink)
@flashinfer_api(trace=shrink_pairs_trace)
def shrink_pairs(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    per_pair_input: bool = False,
) -> None:
    """``y[s, p] += A x``: the first product of LoRA for pairs of tokens and experts.

    x is the row of pair p's token, and A the matrix of its token's adapter and its expert. Products
    are summed in float32 and rounded to the dtype of `x` before they are added. Equal calls give
    equal bits.

    Parameters
    ----------
    y : torch.Tensor
        ``[slices, pairs, rank]``, float32: is added to. A pair without a matrix adds nothing.
    x : torch.Tensor
        ``[tokens, k]``, bfloat16 or float16, rows contiguous, on a Hopper GPU.
    weights : list of torch.Tensor
        For each slice ``[adapters, experts, rank, k]``, contiguous, dtype of `x`. rank and k are
        multiples of 8; at most 1024 experts.
    sorted_token_ids, expert_ids : torch.Tensor
        ``[pairs]``, int32 or int64, in any order. Numbers that do not exist have no matrix.
    lora_indices : torch.Tensor
        ``[tokens]``, int32 or int64: adapters; others than 0 to adapters - 1 have no matrix.
    per_pair_input : bool
        `x` is ``[pairs, k]``: a row for each pair.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.

    Notes
    -----
    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    _check_cuda(weights, y, x, sorted_token_ids, expert_ids, lora_indices)
    pairs, num_tokens = sorted_token_ids.shape[0], lora_indices.shape[0]
    if pairs == 0 or num_tokens == 0:
        return
    adapters, experts = weights[0].shape[:2]
    matrix = find_matrices(sorted_token_ids, expert_ids, lora_indices, adapters, experts)
    parts = Part.of_pairs(matrix, adapters, experts)
    if per_pair_input:
        source = torch.arange(pairs, dtype=torch.int32, device=x.device)
    else:
        source = sorted_token_ids.clamp(0, num_tokens - 1).to(torch.int32)
    factor = torch.ones(pairs, dtype=torch.float32, device=x.device)
    for s, weight in enumerate(weights):
        y[s].add_(multiply(parts, x, source, weight, factor))


@supported_compute_capability(_SUPPORTED)
def _check_expand(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_indices: torch.Tensor,
    slice_start_loc: torch.Tensor,
    finalize: bool,
) -> bool:
    check_weights("weights", weights)
    check_pairs(sorted_token_ids, expert_ids, lora_indices)
    pairs = sorted_token_ids.shape[0]
    check_shape("x", x, (len(weights), pairs, weights[0].shape[3]))
    checks.dtype("x", x.dtype, (torch.float32, *_HALF))
    check_shape("topk_weights", topk_weights, (pairs,))
    checks.dtype("topk_weights", topk_weights.dtype, (torch.float32,))
    check_shape("slice_start_loc", slice_start_loc, (len(weights),))
    checks.dtype("slice_start_loc", slice_start_loc.dtype, _INDEX)
    checks.tensor("y", y, 2)
    checks.dtype("y", y.dtype, (torch.float32,))
    rows = lora_indices.shape[0] if checks.flag("finalize", finalize) else pairs
    widest = max(weight.shape[2] for weight in weights)
    if y.shape[0] != rows or y.shape[1] < widest:
        raise ValueError(
            f"`y` must be [{rows}, at least {widest} columns] for these pairs and weights, got "
            f"{list(y.shape)}"
        )
    return True


@backend_requirement({}, common_check=_check_expand)
@flashinfer_api(trace=expand_pairs_trace)
def expand_pairs(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_indices: torch.Tensor,
    slice_start_loc: torch.Tensor,
    finalize: bool = True,
) -> None:
    """``y[t] += sum_p topk_weights[p] B x[s, p]`` over the pairs p of each token t.

    B is the matrix of the token's adapter and the pair's expert. Products are summed in float32 and
    rounded to the weights' dtype; a token's are weighted and summed in float32 in the order of the
    pairs. Equal calls give equal bits.

    Parameters
    ----------
    y : torch.Tensor
        ``[tokens, columns]``, float32: slice s is added to its columns.
    x : torch.Tensor
        ``[slices, pairs, rank]``, float32, bfloat16 or float16: is rounded to the weights' dtype.
    weights : list of torch.Tensor
        For each slice ``[adapters, experts, columns of the slice, rank]``, bfloat16 or float16,
        contiguous. rank and columns are multiples of 8; at most 1024 experts.
    sorted_token_ids, expert_ids : torch.Tensor
        ``[pairs]``, int32 or int64, in any order. Numbers that do not exist add nothing.
    topk_weights : torch.Tensor
        ``[pairs]``, float32.
    lora_indices : torch.Tensor
        ``[tokens]``, int32 or int64: adapters; others than 0 to adapters - 1 add nothing.
    slice_start_loc : torch.Tensor
        ``[slices]``, int32 or int64: each slice's first column. They lie on the GPU, so that no
        call looks at them: columns that `y` does not have get nothing.
    finalize : bool
        False: `y` is ``[pairs, columns]``, and each pair's product is added without its weight.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.

    Notes
    -----
    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    _check_cuda(weights, y, x, sorted_token_ids, expert_ids, lora_indices)
    checks.cuda_tensors(topk_weights=topk_weights)
    pairs, num_tokens = sorted_token_ids.shape[0], lora_indices.shape[0]
    if pairs == 0 or num_tokens == 0:
        return
    adapters, experts = weights[0].shape[:2]
    matrix = find_matrices(sorted_token_ids, expert_ids, lora_indices, adapters, experts)
    order = torch.arange(pairs, device=x.device)
    tokens, factor = sorted_token_ids, torch.ones_like(topk_weights)
    if finalize:
        exists = (sorted_token_ids >= 0) & (sorted_token_ids < num_tokens)
        tokens, order = torch.where(exists, sorted_token_ids, num_tokens).sort(stable=True)
        matrix, factor = matrix.index_select(0, order), topk_weights.index_select(0, order)
    parts = Part.of_pairs(matrix, adapters, experts)
    for s, weight in enumerate(weights):
        rows = multiply(parts, x[s].to(weight.dtype), order.to(torch.int32), weight, factor)
        if finalize:
            rows = sum_by_token(rows, tokens, num_tokens)
        columns = slice_start_loc[s] + torch.arange(weight.shape[2], device=y.device)
        is_beyond = (columns < 0) | (
            columns >= y.shape[1]
        )  # an index error ends the process's work
        y.index_add_(1, columns.masked_fill(is_beyond, 0), rows.masked_fill_(is_beyond, 0.0))
