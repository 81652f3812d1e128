"""Custom masks and multi-item scoring: arguments of prefill plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..._common.packbits import segment_packbits
from ..checks import check_count
from .page_tables import check_fits
from .problem import AttentionProblem


def add_mask(
    problem: AttentionProblem,
    custom_mask: Any,
    packed_custom_mask: Any,
    device: torch.device,
    mask_buffer: torch.Tensor | None = None,
    indptr_buffer: torch.Tensor | None = None,
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Put a mask of bools or of packed bits into `problem`.

    With buffers (of a CUDA graph) it may be longer than the batch needs, as queries and page
    numbers may be: engines capture with a mask of the largest batch.

    Returns
    -------
    list of tuple
        With buffers: what `keep` has to copy to them once the plan is made.

    Raises
    ------
    TypeError, ValueError
        If it is of another dtype or has not an element for each pair of query and key.
    """
    _check_counts(problem)
    bits = problem.qo_lengths().numpy().astype(np.int64) * problem.kv_lengths().numpy()
    longer = mask_buffer is not None
    if packed_custom_mask is None:
        offsets = np.concatenate([[0], np.cumsum(bits)])
        mask = _vector("custom_mask", as_bools(custom_mask), torch.bool, int(offsets[-1]), longer)
        packed, _ = segment_packbits(mask.to(device), torch.from_numpy(offsets), "little")
    else:
        packed = packed_custom_mask
    offsets = np.concatenate([[0], np.cumsum((bits + 7) // 8)])
    if offsets[-1] >= 2**31:
        raise ValueError(f"`custom_mask` must have less than 2^31 bytes, got {offsets[-1]}")
    packed = _vector("packed_custom_mask", packed, torch.uint8, int(offsets[-1]), longer).to(device)
    indptr = torch.from_numpy(offsets.astype(np.int32)).to(device)
    if mask_buffer is None or indptr_buffer is None:
        problem.custom_mask, problem.mask_indptr = packed, indptr
        return []
    problem.custom_mask, problem.mask_indptr = mask_buffer, indptr_buffer
    pending = [("custom_mask", packed, mask_buffer), ("mask_indptr", indptr, indptr_buffer)]
    for name, values, buffer in pending:
        check_fits(name, values, buffer)
    return pending


def as_bools(mask: Any) -> Any:
    """A mask of uint8, as engines write them, as bools: what is not 0 is seen."""
    is_bytes = isinstance(mask, torch.Tensor) and mask.dtype == torch.uint8
    return mask != 0 if is_bytes else mask


def _check_counts(problem: AttentionProblem) -> None:
    """The planner checks lengths, but a mask's size is needed before that."""
    batch_size = problem.batch_size
    for name, tensor, count in (
        ("qo_indptr", problem.qo_indptr, batch_size + 1),
        ("paged_kv_last_page_len", problem.last_page_len, batch_size),
    ):
        if tensor is not None and len(tensor) != count:
            raise ValueError(
                f"`{name}` must have {count} elements for {batch_size} requests, got {len(tensor)}"
            )


def add_items(
    problem: AttentionProblem,
    prefix_len_ptr: Any,
    token_pos_in_items_ptr: Any,
    token_pos_in_items_len: Any,
    max_item_len_ptr: Any,
    device: torch.device,
) -> None:
    """Put the tensors of multi-item scoring into `problem`.

    Raises
    ------
    TypeError, ValueError
        If some are missing, of another dtype or shorter than the batch needs.
    """
    batch_size = problem.batch_size
    token_pos_in_items_len = check_count("token_pos_in_items_len", token_pos_in_items_len)
    unsigned = {torch.int32: torch.uint32, torch.int16: torch.uint16}
    problem.token_pos_in_items_len = token_pos_in_items_len
    for name, tensor, dtype, length in (
        ("prefix_len_ptr", prefix_len_ptr, torch.uint32, batch_size),
        (
            "token_pos_in_items_ptr",
            token_pos_in_items_ptr,
            torch.uint16,
            batch_size * token_pos_in_items_len,
        ),
        ("max_item_len_ptr", max_item_len_ptr, torch.uint16, batch_size),
    ):
        if isinstance(tensor, torch.Tensor) and unsigned.get(tensor.dtype) == dtype:
            tensor = tensor.view(dtype)  # lengths and positions are not negative
        if isinstance(tensor, torch.Tensor) and tensor.ndim == 2:
            tensor = tensor.reshape(-1)
        setattr(problem, name, _vector(name, tensor, dtype, length).to(device))


def _vector(
    name: str, tensor: Any, dtype: torch.dtype, length: int, may_be_longer: bool = False
) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise ValueError(
            f"`{name}` must have dtype {str(dtype).removeprefix('torch.')}, got "
            f"{str(tensor.dtype).removeprefix('torch.')}"
        )
    if tensor.ndim == 1 and may_be_longer:
        tensor = tensor[:length]
    if tensor.ndim != 1 or tensor.numel() != length:
        raise ValueError(
            f"`{name}` must have shape [{length}] for this batch, got {list(tensor.shape)}"
        )
    return tensor.contiguous()
