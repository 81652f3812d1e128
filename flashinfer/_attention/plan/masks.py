"""Custom masks and multi-item scoring: arguments of prefill plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..._common.checks import count as check_count
from ..._common.checks import tensor as check_tensor
from ..._common.packbits import segment_packbits
from ...jit.attention.mask_ranges import get_attention_mask_ranges_module
from .requests import CustomMask, ItemScoring, Requests


def make_mask(
    requests: Requests,
    custom_mask: Any,
    packed_custom_mask: Any,
    device: torch.device,
    may_be_longer: bool = False,
) -> CustomMask:
    """The mask of a batch from bools, or from packed bits.

    Parameters
    ----------
    requests : Requests
        The batch.
    custom_mask, packed_custom_mask : torch.Tensor
        Bools or packed bits; the latter take the place of the former.
    device : torch.device
        Device of the result. On a GPU, the host waits for the range of keys that each query sees.
    may_be_longer : bool
        Whether it may be longer than the batch needs, as queries and page numbers may be: engines
        capture a CUDA graph with a mask of the largest batch.

    Raises
    ------
    TypeError, ValueError
        If it is of another dtype or has not an element for each pair of query and key.
    """
    _check_counts(requests)
    bits = requests.qo_lengths().numpy().astype(np.int64) * requests.kv_lengths().numpy()
    if packed_custom_mask is None:
        offsets = np.concatenate([[0], np.cumsum(bits)])
        length = int(offsets[-1])
        mask = _vector("custom_mask", as_bools(custom_mask), torch.bool, length, may_be_longer)
        packed, _ = segment_packbits(mask.to(device), torch.from_numpy(offsets), "little")
    else:
        packed = packed_custom_mask
    offsets = np.concatenate([[0], np.cumsum((bits + 7) // 8)])
    length = int(offsets[-1])
    if length >= 2**31:
        raise ValueError(f"`custom_mask` must have less than 2^31 bytes, got {length}")
    packed = _vector("packed_custom_mask", packed, torch.uint8, length, may_be_longer)
    bits = in_whole_words(packed.to(device))
    indptr = torch.from_numpy(offsets.astype(np.int32)).to(device)
    is_final = device.type == "cuda" and not may_be_longer  # graphs may change the bits
    return CustomMask(bits, indptr, _visible_keys(requests, bits, indptr) if is_final else None)


def in_whole_words(bits: torch.Tensor) -> torch.Tensor:
    """Packed bits whose memory ends with a word of 4 bytes, since kernels read words of them.

    They are copied where it does not, though such a read does no harm on a GPU: allocations there
    end with many words. compute-sanitizer counts bytes.
    """
    storage = bits.untyped_storage()
    end = bits.data_ptr() + bits.numel()
    if -end % 4 <= storage.data_ptr() + storage.nbytes() - end:
        return bits
    words = bits.new_empty(-(-bits.numel() // 4) * 4)
    words[: bits.numel()] = bits
    return words[: bits.numel()]


def _visible_keys(requests: Requests, bits: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """``CustomMask.visible`` of a mask on a GPU, for which the host waits."""
    begins = requests.qo_indptr
    if begins is None:
        begins = torch.arange(requests.batch_size + 1).mul_(requests.tokens_per_request).int()
    device, lengths = bits.device, requests.kv_lengths()
    visible = torch.empty(requests.num_qo_tokens, 2, dtype=torch.int32, device=device)
    get_attention_mask_ranges_module().attention_mask_ranges(
        visible, bits, indptr, begins.to(device), lengths.int().to(device)
    )
    return visible.cpu()


def as_bools(mask: Any) -> Any:
    """A mask of uint8, as engines write them, as bools: what is not 0 is seen."""
    is_bytes = isinstance(mask, torch.Tensor) and mask.dtype == torch.uint8
    return mask != 0 if is_bytes else mask


def _check_counts(requests: Requests) -> None:
    """The planner checks lengths, but a mask's size is needed before that."""
    batch_size = requests.batch_size
    for name, tensor, count in (
        ("qo_indptr", requests.qo_indptr, batch_size + 1),
        ("paged_kv_last_page_len", requests.last_page_len, batch_size),
    ):
        if tensor is not None and len(tensor) != count:
            raise ValueError(
                f"`{name}` must have {count} elements for {batch_size} requests, got {len(tensor)}"
            )


def make_items(
    batch_size: int,
    prefix_len_ptr: Any,
    token_pos_in_items_ptr: Any,
    token_pos_in_items_len: Any,
    max_item_len_ptr: Any,
    device: torch.device,
) -> ItemScoring:
    """The tensors of multi-item scoring, on `device`.

    Raises
    ------
    TypeError, ValueError
        If some are missing, of another dtype or shorter than the batch needs.
    """
    if isinstance(token_pos_in_items_len, torch.Tensor) and token_pos_in_items_len.is_cpu:
        token_pos_in_items_len = token_pos_in_items_len.item()
    row = check_count("token_pos_in_items_len", token_pos_in_items_len)
    prefix = _unsigned("prefix_len_ptr", prefix_len_ptr, torch.uint32, batch_size)
    positions = _whole_rows(token_pos_in_items_ptr, batch_size, row)
    longest = _unsigned("max_item_len_ptr", max_item_len_ptr, torch.uint16, batch_size)
    return ItemScoring(prefix.to(device), positions.to(device), row, longest.to(device))


def _whole_rows(positions: Any, batch_size: int, row: int) -> torch.Tensor:
    """`token_pos_in_items_ptr`; the row of a single request may be shorter, or longer."""
    name, length = "token_pos_in_items_ptr", batch_size * row
    if batch_size == 1 and isinstance(positions, torch.Tensor) and positions.numel() != length:
        flat = positions.reshape(-1)[:length]
        positions = torch.cat([flat, flat.new_zeros(length - flat.numel())])
    return _unsigned(name, positions, torch.uint16, length)


def _unsigned(name: str, tensor: Any, dtype: torch.dtype, length: int) -> torch.Tensor:
    """Lengths or positions, which are not negative: signed ones count as unsigned."""
    signed = {torch.int32: torch.uint32, torch.int16: torch.uint16}
    if isinstance(tensor, torch.Tensor) and signed.get(tensor.dtype) == dtype:
        tensor = tensor.view(dtype)
    if isinstance(tensor, torch.Tensor) and tensor.ndim != 1:
        tensor = tensor.reshape(-1)
    return _vector(name, tensor, dtype, length)


def _vector(
    name: str, tensor: Any, dtype: torch.dtype, length: int, may_be_longer: bool = False
) -> torch.Tensor:
    check_tensor(name, tensor)
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
