"""CUDA graphs: the buffers that they read, and what a captured launch fixes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..plan.executor import PlanOptions
from ..plan.launch import Workspaces
from ..plan.requests import AttentionProblem, check_index_vector, page_numbers
from ..plan.spec import AttentionSpec

# `causal` counts by the mask that follows from it; a wrapper has one backend.
_FIXED_OPTIONS = tuple(
    field.name
    for field in dataclasses.fields(AttentionSpec)
    if field.init and field.name not in ("causal", "backend")
)


def fixed_options(problem: AttentionProblem) -> dict[str, Any]:
    """Options and sizes that a captured launch contains and a plan cannot change."""
    requests = problem.requests
    return {
        **{name: getattr(problem.spec, name) for name in _FIXED_OPTIONS},
        "page_size": requests.page_size,
        "tokens_per_request": requests.tokens_per_request,
    }


def fixed_by_capture(
    problem: AttentionProblem, options: PlanOptions, workspaces: Workspaces
) -> dict[str, Any]:
    """All that a captured launch contains and a plan cannot change; tensors by their addresses."""
    tensors = problem.tensors
    mask = {} if tensors.mask is None else tensors.mask._asdict()
    addressed = {
        "kv_indices": tensors.kv_indices,
        "alibi_slopes": tensors.alibi_slopes,
        "float_workspace_buffer": workspaces.floats,
        "int_workspace_buffer": workspaces.ints,
        **{_MASK_NAMES.get(name, name): value for name, value in mask.items()},
    }
    return {
        **fixed_options(problem),
        "mask": problem.mask_mode,
        "fixed_split_size": options.fixed_split_size,
        "disable_split_kv": options.disable_split_kv,
        **{
            name: value.data_ptr() if isinstance(value, torch.Tensor) else value
            for name, value in addressed.items()
        },
    }


_MASK_NAMES = {"bits": "custom_mask", "indptr": "mask_indptr"}


def check_unchanged(captured: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a plan that a captured launch would not see."""
    for name, before in captured.items():
        if now.get(name) != before:
            raise ValueError(
                f"`{name}` must stay what it was when a CUDA graph was captured, {before}, got "
                f"{now.get(name)}: the graph would not see it"
            )


# --- Buffers ------------------------------------------------------------------------------------


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
