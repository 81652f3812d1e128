"""Bits from bytes: masks as the attention kernels read them."""

from typing import cast

import torch

from .._instrument.decorator import flashinfer_api
from ..jit.quantization import PackBitsConfig, gen_packbits_module
from ..trace.templates.quantization import packbits_trace, segment_packbits_trace
from . import checks
from .dtypes import torch_name
from .kernels import NOT_LOADED, Kernel, KernelTable

# The generator of FlashInfer's name for what packs bits.
gen_quantization_module = gen_packbits_module

_BYTES = (torch.bool, torch.uint8, torch.int8)


def _get_kernel(index: str) -> Kernel:
    return cast(Kernel, gen_packbits_module(PackBitsConfig(index)).build_and_load().packbits)


_kernels = KernelTable(_get_kernel)  # by the dtype of `indptr`, or "none"


def _kernel(index: str) -> Kernel:
    try:
        return _kernels[index]
    except NOT_LOADED:
        return _kernels.load(index)


def _one_byte_per_bit(x: object) -> torch.Tensor:
    x = checks.tensor("x", x)
    if x.is_complex():
        raise ValueError(f"`x` must have a real dtype, got {torch_name(x.dtype)}")
    if x.ndim != 1:
        raise ValueError(f"`x` must have 1 dimension, got shape {list(x.shape)}")
    checks.cuda_tensors(x=x)
    return x if x.dtype in _BYTES else x != 0


@flashinfer_api(trace=packbits_trace)
def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Pack eight elements into a byte, as `numpy.packbits` does.

    Parameters
    ----------
    x : torch.Tensor
        ``[n]``, contiguous; an element that is not zero is a one. Dtypes other than bool, uint8
        and int8 (real ones) cost a pass that compares them with zero.
    bitorder : {"big", "little"}
        Whether the first of eight elements is the highest or the lowest bit of its byte.

    Returns
    -------
    torch.Tensor
        ``[(n + 7) // 8]``, uint8. Bits past the end are zero.

    Raises
    ------
    TypeError
        If `x` is not a tensor.
    ValueError
        If `x` is not a contiguous vector on the GPU, or `bitorder` is another word.

    Examples
    --------
    >>> x = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 1], dtype=torch.bool, device="cuda")
    >>> flashinfer.packbits(x).tolist()
    [207, 128]
    """
    checks.choice("bitorder", bitorder, ("big", "little"))
    x = _one_byte_per_bit(x)
    out = torch.empty((x.shape[0] + 7) // 8, dtype=torch.uint8, device=x.device)
    _kernel("none")(out, x, bitorder == "big")
    return out


def _segment_offsets(indptr: object, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`indptr` checked, and the offsets of the packed segments; both on the CPU."""
    indptr = checks.tensor("indptr", indptr)
    if indptr.ndim != 1 or not indptr.numel() or indptr.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "`indptr` must be a vector of at least one int32 or int64, got "
            f"{torch_name(indptr.dtype)} of shape {list(indptr.shape)}"
        )
    offsets = indptr.cpu()
    lengths = offsets.long().diff()  # differences of int32 may not fit
    if offsets[0] != 0 or offsets[-1] != length or bool((lengths < 0).any()):
        raise ValueError(
            f"`indptr` must rise from 0 to the length of `x`, {length}; it begins with "
            f"{int(offsets[0])}, ends with {int(offsets[-1])}"
            + (" and falls in between" if bool((lengths < 0).any()) else "")
        )
    packed = torch.zeros_like(offsets)
    packed[1:] = ((lengths + 7) // 8).cumsum(0)
    return offsets, packed


@flashinfer_api(trace=segment_packbits_trace)
def segment_packbits(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack each segment of a vector by itself, so that it begins with a byte of its own.

    Parameters
    ----------
    x : torch.Tensor
        ``[n]``, as for `packbits`.
    indptr : torch.Tensor
        ``[num_segments + 1]``, int32 or int64: segment i is ``x[indptr[i]:indptr[i + 1]]``. Rises
        from 0 to n. On the CPU or on the GPU; its values are needed to allocate the result, so one
        on the GPU waits for the device (and cannot be captured in a CUDA graph).
    bitorder : {"big", "little"}
        As for `packbits`.

    Returns
    -------
    packed : torch.Tensor
        ``[packed_indptr[-1]]``, uint8.
    packed_indptr : torch.Tensor
        ``[num_segments + 1]``, where the packed segments begin; dtype of `indptr`, on the device
        of `x`.

    Raises
    ------
    TypeError
        If `x` or `indptr` is not a tensor.
    ValueError
        As for `packbits`; or if `indptr` does not divide `x`.

    Examples
    --------
    >>> x = torch.ones(5, dtype=torch.bool, device="cuda")
    >>> packed, indptr = flashinfer.segment_packbits(x, torch.tensor([0, 3, 5]), "little")
    >>> packed.tolist(), indptr.tolist()
    ([7, 3], [0, 1, 2])
    """
    checks.choice("bitorder", bitorder, ("big", "little"))
    x = _one_byte_per_bit(x)
    offsets, packed_offsets = _segment_offsets(indptr, x.shape[0])
    packed_indptr = packed_offsets.to(x.device)
    out = torch.empty(int(packed_offsets[-1]), dtype=torch.uint8, device=x.device)
    index = torch_name(indptr.dtype)
    starts = indptr if indptr.device == x.device else offsets.to(x.device)
    _kernel(index)(out, x, starts.contiguous(), packed_indptr, bitorder == "big")
    return out, packed_indptr
