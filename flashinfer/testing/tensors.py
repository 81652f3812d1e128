"""Test and benchmark tensors: layout-true copies, poisoned outputs, awkward inputs.

A copy made here copies whole storages, not values: views that share memory in the original share
it in the copy, and row strides, gaps and storage offsets (so: misalignment) survive. That is what
makes a copy a fair stand-in for the caller's tensor in an in-place or aliasing call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .._common.dtypes import torch_name

__all__ = [
    "clone_arguments",
    "copies_to_exceed",
    "fill_with_poison",
    "iter_tensors",
    "make_tensor",
    "poisoned_allocations",
    "poisoned_like",
    "sprinkle_special_values",
    "storage_bytes",
    "unviewed_bytes",
]

# Every byte of an integer, bool or unknown type. 0xA5 is neither 0 nor -1 nor a small count, and
# easy to spot in a dump.
POISON_BYTE = 0xA5
# A byte that is NaN in the one-byte float formats (and, repeated, in no format a number that a
# kernel would write).
_NAN_BYTE = {
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7F,
    "float8_e4m3fnuz": 0x80,
    "float8_e5m2fnuz": 0x80,
    "float8_e8m0fnu": 0xFF,
}


def iter_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested tuples, lists and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from iter_tensors(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from iter_tensors(item)


def _map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(
        tree, "_fields"
    ):  # a named tuple takes its fields one by one
        return type(tree)(*(_map_tensors(item, function) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_tensors(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(value, function) for key, value in tree.items()}
    return tree


def _storage_key(tensor: torch.Tensor) -> tuple[str, int]:
    # An empty storage has no address; such tensors alias nothing, so each is its own.
    address = tensor.untyped_storage().data_ptr()
    return (str(tensor.device), address if address else -id(tensor))


def clone_arguments(tree: Any, *, where: Callable[[torch.Tensor], bool] | None = None) -> Any:
    """Copy every tensor in nested arguments, keeping layout and aliasing.

    Parameters
    ----------
    tree : Any
        Tensors in nested tuples, lists and dicts; anything else is passed through unchanged.
    where : Callable[[torch.Tensor], bool], optional
        Tensors for which it returns False are shared with the original instead of copied.

    Returns
    -------
    Any
        The same structure. Two tensors that share storage in ``tree`` share storage in the copy,
        each with its size, stride and storage offset.
    """
    storages: dict[tuple[str, int], torch.UntypedStorage] = {}

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        if where is not None and not where(tensor):
            return tensor
        key = _storage_key(tensor)
        if key not in storages:
            storages[key] = tensor.untyped_storage().clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())

    with torch.no_grad():
        return _map_tensors(tree, clone)


def storage_bytes(tree: Any) -> int:
    """Bytes of the distinct CUDA storages that the tensors in ``tree`` view."""
    sizes = {_storage_key(t): t.untyped_storage().nbytes() for t in iter_tensors(tree) if t.is_cuda}
    return sum(sizes.values())


def copies_to_exceed(nbytes_per_copy: int, nbytes_wanted: int, *, limit: int = 1024) -> int:
    """How many copies it takes to hold ``nbytes_wanted`` bytes; at least 1, at most ``limit``."""
    if nbytes_per_copy <= 0:
        return 1
    return max(1, min(limit, -(-nbytes_wanted // nbytes_per_copy)))


def fill_with_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite ``tensor`` in place with values that no correct kernel writes; returns it.

    Floating types become NaN (one-byte formats through their NaN byte), every other type the byte
    0xA5 repeated."""
    name = torch_name(tensor.dtype)
    if tensor.is_floating_point() and name not in _NAN_BYTE and tensor.element_size() > 1:
        return tensor.fill_(float("nan"))
    byte = _NAN_BYTE.get(name, POISON_BYTE)
    size = tensor.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    value = int.from_bytes(bytes([byte]) * size, "little", signed=size > 1)
    tensor.view(integer).fill_(value)
    return tensor


def poisoned_like(tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An output buffer that shows every element a kernel forgets to write.

    Parameters
    ----------
    tensor : torch.Tensor
        Gives shape, device, strides and storage offset.
    dtype : torch.dtype, optional
        Element type of the result; that of ``tensor`` by default.

    Returns
    -------
    torch.Tensor
        Poisoned over its whole storage, gaps between rows included: NaN for floating types (fp8
        too), the byte 0xA5 repeated for integers and bools. See :func:`unviewed_bytes` for
        finding writes into the gaps.
    """
    dtype = dtype or tensor.dtype
    extent = (
        tensor.storage_offset()
        + 1
        + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    )
    extent = tensor.storage_offset() if tensor.numel() == 0 else extent
    # The tail keeps a stretch of poison after the last element too, where an overrun would land.
    tail = 16
    storage = fill_with_poison(torch.empty(extent + tail, dtype=dtype, device=tensor.device))
    return storage.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within the block, ``torch.empty`` and friends return NaN (integers: their maximum).

    For calls that allocate their own result, where :func:`poisoned_like` has nothing to hold on to.
    """
    settings: Any = torch.utils.deterministic  # a module with properties, which mypy cannot see
    fill, deterministic = (
        settings.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
    )
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def unviewed_bytes(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of a storage that no element of ``views`` covers, as one uint8 tensor.

    Parameters
    ----------
    views : Sequence[torch.Tensor]
        One or more tensors over the same storage.

    Returns
    -------
    torch.Tensor
        1-D uint8. Equal before and after a call if and only if the call wrote nowhere but into
        the views.
    """
    storage = views[0].untyped_storage()
    device = views[0].device
    raw = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    free = torch.ones(raw.numel(), dtype=torch.bool, device=device)
    for view in views:
        width = view.element_size()
        byte_strides = [s * width for s in view.stride()] + [1]
        free.as_strided([*view.size(), width], byte_strides, view.storage_offset() * width).fill_(
            False
        )
    return raw[free]


def make_tensor(
    *shape: int,
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    generator: torch.Generator | None = None,
    row_stride: int | None = None,
    storage_offset: int = 0,
    mean: float = 0.0,
    std: float = 1.0,
) -> torch.Tensor:
    """A normal random tensor with a chosen row stride and a chosen misalignment.

    Parameters
    ----------
    *shape : int
        Size of each dimension; the last one is contiguous.
    dtype : torch.dtype
        Any floating type; drawn in float32 and rounded.
    device : torch.device or str
        Where the tensor lives.
    generator : torch.Generator, optional
        Source of the randomness, on ``device``.
    row_stride : int, optional
        Elements from one row (last dimension) to the next; ``shape[-1]`` (no gap) by default.
        Gaps hold NaN, so a kernel that reads them shows it.
    storage_offset : int
        Elements before the first one; 1 makes a bf16 tensor 2-byte aligned only.
    mean, std : float
        Mean and deviation of the distribution, before rounding to ``dtype``.

    Raises
    ------
    ValueError
        If ``row_stride`` is shorter than a row.
    """
    width = shape[-1] if shape else 1
    row_stride = width if row_stride is None else row_stride
    if row_stride < width:
        raise ValueError(f"row_stride must be at least the row length {width}, got {row_stride}")
    strides, step = [1], row_stride
    for n in reversed(shape[1:-1]):
        strides.append(step)
        step *= n
    if len(shape) > 1:
        strides.append(step)
    size = torch.Size(shape)
    stride = tuple(reversed(strides))[: len(shape)]
    values = torch.randn(size, dtype=torch.float32, device=device, generator=generator) * std + mean
    extent = storage_offset + (
        0 if size.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    )
    storage = fill_with_poison(torch.empty(extent, dtype=dtype, device=device))
    view = storage.as_strided(size, stride, storage_offset)
    return view.copy_(values)


def sprinkle_special_values(
    tensor: torch.Tensor,
    *,
    generator: torch.Generator | None = None,
    fraction: float = 0.02,
    nan_and_inf: bool = True,
) -> torch.Tensor:
    """Overwrite a random few elements in place with values that arithmetic trips over.

    Zeros of both signs, the smallest subnormal and normal number of the type, its largest finite
    number and (unless ``nan_and_inf`` is False or the type has none) NaN and both infinities.

    Parameters
    ----------
    tensor : torch.Tensor
        Floating type.
    generator : torch.Generator, optional
        On the device of ``tensor``.
    fraction : float
        Expected share of elements to overwrite.
    nan_and_inf : bool
        Whether NaN and infinities are among them.
    """
    info = torch.finfo(tensor.dtype)
    specials = [
        0.0,
        -0.0,
        info.smallest_normal,
        -info.smallest_normal,
        info.smallest_normal * info.eps,
        info.max,
        info.min,
    ]
    if nan_and_inf:
        specials += [float("nan"), float("inf"), float("-inf")]
    device = tensor.device
    # float64 holds each of them exactly; formats without an infinity turn it into their NaN or
    # maximum.
    pool = torch.tensor(specials, dtype=torch.float64, device=device)
    chosen = torch.randint(len(specials), tensor.shape, device=device, generator=generator)
    where = torch.rand(tensor.shape, device=device, generator=generator) < fraction
    return tensor.copy_(torch.where(where, pool[chosen], tensor.double()).to(tensor.dtype))
