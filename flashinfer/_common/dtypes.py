"""Names of the dtypes that kernels are compiled for: one table for file names, C++ and messages."""

from __future__ import annotations

import torch

SHORT_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}

# Floating dtypes in the names of definitions, by PyTorch's name.
SHORT_FLOATS = {
    str(dtype).removeprefix("torch."): short
    for dtype, short in SHORT_NAMES.items()
    if dtype.is_floating_point
}

FLOAT = (torch.float16, torch.bfloat16, torch.float32)
HALF = (torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def short_name(dtype: torch.dtype) -> str:
    """Name for files and module names, such as ``bf16``."""
    return SHORT_NAMES[dtype]


def torch_name(dtype: torch.dtype | str) -> str:
    """PyTorch's name without the prefix, such as ``bfloat16``: also the type's name in our C++."""
    return str(dtype).removeprefix("torch.")


def check_dtype(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    """Refuse a dtype that no kernel is written for.

    Raises
    ------
    ValueError
        Naming the argument `name`, its dtype and the allowed ones.
    """
    if dtype not in allowed:
        names = [torch_name(d) for d in allowed]
        listed = ", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]
        raise ValueError(f"`{name}` must have dtype {listed}, got {torch_name(dtype)}")
