"""Whether tensors have memory in common, as csrc/ffi_checks.h decides it for the kernels."""

from __future__ import annotations

import torch


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    return _reach(tensor) * tensor.element_size()


def check_disjoint(name: str, written: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Refuse a written tensor that shares elements with one of the others, which may be None."""
    for other_name, other in others.items():
        if other is not None and _share_elements(written, other):
            raise ValueError(f"`{name}` must not share memory with `{other_name}`")


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device != b.device or a.is_meta or not a.numel() or not b.numel():
        return False
    distance = b.data_ptr() - a.data_ptr()
    if not -extent(b) < distance < extent(a):
        return False
    if a.element_size() != b.element_size():
        return True
    # Column slices of one wider tensor lie in bands of one pitch, and may have nothing in common.
    for pitch in {*a.stride(), *b.stride()} - {0}:
        phase = distance // a.element_size() % pitch
        if phase >= _reach(a, pitch) and phase + _reach(b, pitch) <= pitch:
            return False
    return True


def _reach(tensor: torch.Tensor, pitch: int = 0) -> int:
    """Elements from the first to the end of the last; without whole steps of `pitch`, if given."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps if not pitch or step % pitch)
