"""Device memory at an address, seen as a tensor."""

from __future__ import annotations

import torch


class _Memory:
    """Bytes at an address by CUDA's array interface, which PyTorch takes without a copy."""

    def __init__(self, address: int, shape: tuple[int, int], stride: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": (stride, 1),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def pack_strided_memory(
    ptr: int,
    segment_size: int,
    segment_stride: int,
    num_segments: int,
    dtype: torch.dtype,
    dev_id: int,
) -> torch.Tensor:
    """Segments of device memory at equal distances as the rows of a tensor.

    Parameters
    ----------
    ptr : int
        Address of the first segment. The tensor does not keep the memory alive.
    segment_size, segment_stride : int
        Bytes of a segment, and from the begin of one to that of the next.
    num_segments : int
        Rows of the tensor.
    dtype : torch.dtype
        Its elements divide `segment_size` and `segment_stride`.
    dev_id : int
        The GPU of the memory.

    Returns
    -------
    torch.Tensor
        ``[num_segments, segment_size / itemsize]``.

    Raises
    ------
    ValueError
        If a segment or the distance is no whole number of elements.
    """
    for name, size in (("segment_size", segment_size), ("segment_stride", segment_stride)):
        if size % dtype.itemsize:
            raise ValueError(f"`{name}` must be a multiple of {dtype.itemsize}, got {size}")
    memory = _Memory(ptr, (num_segments, segment_size), segment_stride)
    return torch.as_tensor(memory, device=torch.device("cuda", dev_id)).view(dtype)
