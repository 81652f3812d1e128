"""CUDA graphs: the buffers that they read, and what a captured launch fixes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..plan.launch import PlanOptions, Workspaces
from ..plan.requests import AttentionProblem
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
