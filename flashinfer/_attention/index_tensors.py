"""Index tensors: brought to the host or the device, and copied to the buffers of CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._common.checks import tensor as check_tensor

INDEX_DTYPES = (torch.int32, torch.int64, torch.uint32)


def host_page_table(
    qo_indptr: Any | None,
    indptr: Any,
    last_page_len: Any,
    seq_lens: Any | None,
    page_size: int,
    names: tuple[str, str, str],
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Index tensors on the host: qo_indptr, indptr, lengths or None, last_page_len or None.

    Parameters
    ----------
    names : tuple of str
        The caller's names of `qo_indptr`, `indptr` and `last_page_len`.

    Notes
    -----
    Lengths come from `last_page_len`, or from `seq_lens` if only these are on the host: fetching
    makes the host wait for the GPU. Pages of one token say the lengths themselves.
    """
    ready = seq_lens is None and _is_ready(indptr) and _is_ready(last_page_len)
    if ready and (qo_indptr is None or _is_ready(qo_indptr)):
        return qo_indptr, indptr, None, last_page_len  # nothing to do in the usual case
    qo_name, indptr_name, last_name = names
    wanted: dict[str, Any] = {}
    if qo_indptr is not None:
        wanted[qo_name] = qo_indptr
    wanted[indptr_name] = indptr
    on_gpu = isinstance(last_page_len, torch.Tensor) and last_page_len.is_cuda
    take_last = not (on_gpu and (page_size == 1 or seq_lens is not None))
    if take_last:
        wanted[last_name] = last_page_len
    if seq_lens is not None:
        wanted["seq_lens"] = seq_lens
    found = dict(zip(wanted, host_indices(wanted), strict=True))
    kv_len = found.get("seq_lens")
    last = found.get(last_name)
    host_indptr = found[indptr_name]
    if kv_len is None and last is None:
        last = torch.ones(max(len(host_indptr) - 1, 0), dtype=torch.int32)
    return found.get(qo_name), host_indptr, kv_len, last


def _is_ready(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.is_cpu
        and tensor.dtype is torch.int32
        and tensor.ndim == 1
        and tensor.is_contiguous()
    )


def host_indices(tensors: Mapping[str, Any]) -> list[torch.Tensor]:
    """Index tensors as contiguous int32 vectors on the host.

    What lies on a GPU is fetched by one copy, for which the host waits.
    """
    found = list(tensors.values())
    distant = []
    for i, tensor in enumerate(found):
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.int32 and tensor.ndim == 1:
            if not tensor.is_cpu:
                distant.append(i)
            elif not tensor.is_contiguous():
                found[i] = tensor.contiguous()
            continue
        name = list(tensors)[i]
        check_index_vector(name, tensor)
        if tensor.is_cpu:
            found[i] = _as_int32(name, tensor)
        else:
            found[i] = tensor.to(torch.int64)
            distant.append(i)
    if distant:
        names = list(tensors)
        devices = {str(found[i].device) for i in distant}
        if len(devices) > 1:
            listed = ", ".join(f"`{names[i]}`" for i in distant)
            raise ValueError(f"{listed} must be on one device, got {sorted(devices)}")
        together = torch.cat([found[i] for i in distant]).cpu()
        parts = together.split([found[i].numel() for i in distant])
        for i, part in zip(distant, parts, strict=True):
            found[i] = _as_int32(names[i], part)
    return found


def check_index_vector(name: str, tensor: Any) -> None:
    """A vector of int32, int64 or uint32."""
    if not isinstance(tensor, torch.Tensor):  # every plan passes here: no call for what is right
        check_tensor(name, tensor)
    if tensor.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"`{name}` must have dtype int32, int64 or uint32, got "
            f"{str(tensor.dtype).removeprefix('torch.')}"
        )
    if tensor.ndim != 1:
        raise ValueError(f"`{name}` must have 1 dimension, got shape {list(tensor.shape)}")


def _as_int32(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype != torch.int32:
        tensor = tensor.to(torch.int64)  # uint32 has no minimum
        if tensor.numel() and not -(2**31) <= int(tensor.min()) <= int(tensor.max()) < 2**31:
            raise ValueError(f"`{name}` must have values that fit int32, got {int(tensor.max())}")
        tensor = tensor.to(torch.int32)
    return tensor.contiguous()


def device_indices(name: str, tensor: Any, device: torch.device) -> torch.Tensor:
    """Page numbers as a contiguous int32 vector on `device`."""
    check_index_vector(name, tensor)
    if tensor.dtype == torch.int32 and tensor.device == device and tensor.is_contiguous():
        return tensor
    return page_numbers(tensor).to(device=device, dtype=torch.int32).contiguous()


def page_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Page numbers whose values fit int32: one beyond stays one that no cache has."""
    if tensor.dtype == torch.int32:
        return tensor
    return tensor.to(torch.int64).clamp(-1, 2**31 - 1)


# --- Buffers of CUDA graphs ----------------------------------------------------------------------


def check_fits(name: str, values: torch.Tensor, buffer: torch.Tensor) -> None:
    """Refuse what a CUDA graph's buffer has no room for."""
    if values.numel() > buffer.numel():
        raise ValueError(
            f"`{name}` must have at most the {buffer.numel()} elements of its buffer, got "
            f"{values.numel()}: a CUDA graph cannot grow"
        )


def copy_to_buffer(
    name: str, values: Any, buffer: torch.Tensor, non_blocking: bool = True
) -> torch.Tensor:
    """Copy `values` to the front of a CUDA graph's buffer; returns the buffer.

    With `non_blocking`, values in pinned memory must stay what they are until the copy has run.

    Raises
    ------
    ValueError
        If they do not fit.
    """
    check_fits(name, values, buffer)
    if values.data_ptr() != buffer.data_ptr() and values.numel():
        buffer[: values.numel()].copy_(page_numbers(values), non_blocking=non_blocking)
    return buffer


def check_buffer(
    name: str, buffer: Any, dtype: torch.dtype, device: torch.device, length: int | None = None
) -> torch.Tensor:
    """A buffer that a wrapper for CUDA graphs is made with."""
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(
            f"`{name}` must be a torch.Tensor with `use_cuda_graph`, got {type(buffer).__name__}"
        )
    if buffer.dtype != dtype or buffer.ndim != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"`{name}` must be a contiguous vector of {str(dtype).removeprefix('torch.')}, got "
            f"{str(buffer.dtype).removeprefix('torch.')} of shape {list(buffer.shape)}"
        )
    if buffer.device != device:
        raise ValueError(f"`{name}` must be on {device} as the workspace is, got {buffer.device}")
    if length is not None and buffer.numel() != length:
        raise ValueError(f"`{name}` must have {length} elements, got {buffer.numel()}")
    return buffer


def check_page_numbers(
    name: str, indices: Any, buffer: torch.Tensor, indptr: torch.Tensor
) -> torch.Tensor:
    """The buffer that `copy_to_buffer` fills from `indices` once the whole plan is right."""
    check_index_vector(name, indices)
    needed = int(indptr[-1]) if len(indptr) else 0  # an empty one is refused by the planner
    if not needed <= indices.numel() <= buffer.numel():
        raise ValueError(
            f"`{name}` must have from the {needed} elements of the indptr to the "
            f"{buffer.numel()} of its buffer, got {indices.numel()}"
        )
    return buffer
