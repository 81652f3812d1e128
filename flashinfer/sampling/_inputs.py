"""Arguments of this package besides the rows: seeds, numbers per row, flags."""

from __future__ import annotations

from typing import Any

import torch

from .._common import checks
from .._common.conversions import as_dtype, is_convertible
from .._common.numbers import plain

Seed = int | torch.Tensor | None


def get_seed_and_offset(
    increment: int,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> tuple[int, int]:
    """Seed and offset of a CUDA generator, which is then advanced.

    Parameters
    ----------
    increment : int
        How far; rounded up to a multiple of 4, which PyTorch asks of an offset.
    generator : torch.Generator, optional
        None means the default generator of `device`.
    device : torch.device, optional
        None means the current device.

    Returns
    -------
    tuple of int
        ``(seed, offset)`` as they were before.

    Raises
    ------
    RuntimeError
        While a CUDA graph is captured: the numbers would be frozen into it. Pass `seed` and
        `offset` as tensors instead.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "seed and offset of a generator would be frozen into the CUDA graph that is being "
            "captured; pass `seed` and `offset` as tensors"
        )
    if generator is None:
        torch.cuda.init()
        index = device.index if device is not None and device.index is not None else None
        index = torch.cuda.current_device() if index is None else index
        generator = torch.cuda.default_generators[index]
    if generator.device.type != "cuda":
        raise ValueError(f"`generator` must be a CUDA generator, got one on {generator.device}")
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + (increment + 3) // 4 * 4)
    return seed, offset


def _as_int64(name: str, value: Any) -> Any:
    """An unsigned 64-bit integer as the signed one with the same bits; tensors pass."""
    value = plain(value)
    if isinstance(value, int) and value >= 1 << 63:
        if value >= 1 << 64:
            raise ValueError(f"`{name}` must be less than 2^64, got {value}")
        return value - (1 << 64)
    return value


def resolve_seed(
    seed: Seed, offset: Seed, generator: torch.Generator | None, device: torch.device
) -> tuple[Any, Any]:
    if generator is not None:
        checks.optional_generator("generator", generator)
    if seed is None:
        if offset is not None:
            raise ValueError("`offset` needs a `seed`, got None")
        return get_seed_and_offset(4, generator, device)
    return _as_int64("seed", seed), 0 if offset is None else _as_int64("offset", offset)


def row_floats(name: str, value: Any) -> Any:
    """A number, or numbers of the rows as float32."""
    if isinstance(value, torch.Tensor):
        _check_rows(name, value)
        return value.to(torch.float32)
    return value


def row_ints(name: str, value: Any) -> Any:
    """A number, or numbers of the rows as int32."""
    if isinstance(value, torch.Tensor):
        _check_rows(name, value)
        if value.dtype != torch.int32:
            if not is_convertible(value, torch.int32):
                raise ValueError(f"`{name}` must have an integer dtype, got {value.dtype}")
            return as_dtype(value, torch.int32)
    return value


def _check_rows(name: str, value: torch.Tensor) -> None:
    if value.ndim > 1:
        raise ValueError(f"Expected a 1D tensor or scalar for `{name}`, got a {value.ndim}D tensor")


def refuse_nan(name: str, rows: torch.Tensor) -> None:
    if bool(torch.isnan(rows).any()):
        raise ValueError(f"`{name}` must not contain NaN (`check_nan` is set)")
