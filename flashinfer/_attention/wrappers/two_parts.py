"""Launches of two parts, prefill and decode, each with tensors of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._common.checks import named
from ..._common.checks import tensor as check_tensor
from ..checks import (
    HeadScales,
    check_pos_encoding,
    check_window,
    logits_scale,
    positive,
    split_scales,
)
from ..plan.launch import GraphCapacity, PlanOptions, Workspaces
from ..plan.masks import make_mask
from ..plan.requests import AttentionProblem, CustomMask
from ..plan.spec import AttentionSpec
from .base import AttentionWrapper
from .graphs import check_unchanged, fixed_options

Parts = tuple[AttentionProblem, AttentionProblem]
"""The problems of the prefill and of the decode."""
Scales = tuple[Any, Any, Any]
"""Of queries, keys and values of a part, as a caller of ``run`` gives them."""


class RunOptions(NamedTuple):
    """Options of a part, as a caller of ``run`` gives them."""

    pos_encoding_mode: Any = "NONE"
    window_left: Any = -1
    sm_scale: Any = None
    rope_scale: Any = None
    rope_theta: Any = None


class CapturedRun(NamedTuple):
    """The run that a CUDA graph holds."""

    problems: Parts
    key: Any  # what the problems depend on
    workspaces: Workspaces


class TwoPartWrapper(AttentionWrapper):
    """Base of the wrappers whose launch has two parts."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, graph: bool) -> None:
        super().__init__(float_workspace_buffer, kv_layout, graph, "auto", None)
        self._problems: Parts | None = None  # of the latest run
        self._key: Any = None  # what they depend on
        self._captured_run: CapturedRun | None = None

    @property
    def _runs_in_graphs(self) -> bool:
        """A run may plan and allocate, which the memory of a compiled graph cannot hold."""
        return False

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """As for every wrapper; the next `run` plans the launch again."""
        super().reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._problems = self._key = None

    def _plan_for(
        self, key: Any, masks: tuple[torch.Tensor | None, ...], problems: Callable[[], Parts]
    ) -> None:
        """Plan a run's problems, unless the latest plan is for what `key` says.

        A plan with a mask serves its own call only.
        """
        is_masked = any(mask is not None for mask in masks)
        if key != self._key or is_masked:
            planned = problems()
            if self._captured_run is not None:
                raise ValueError(
                    "run() must keep the lengths and options it had when a CUDA graph was "
                    "captured, which reads this wrapper's plan: use another wrapper for others"
                )
            self._plan_run(planned)
            self._key = None if is_masked else key

    def _plan_run(self, problems: Parts) -> None:
        """Plan the two parts of a run."""
        raise NotImplementedError

    def _plan_parts(
        self, problems: Parts, non_blocking: bool, capacity: GraphCapacity | None = None
    ) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "run() must be called with the same lengths and options before a CUDA graph is "
                "captured: they are new, and planning cannot be captured"
            )
        prefill, decode = problems
        self._problems = self._key = None
        options = PlanOptions(capacity=capacity, non_blocking=non_blocking)
        self._executor.plan(prefill, options, second=decode)
        self._problems = problems

    def _note_capture(self) -> None:
        """The run that is captured now: later plans have to be for it."""
        assert self._problems is not None
        workspaces = self._executor.workspaces
        self._captured_run = CapturedRun(self._problems, self._key, workspaces)

    def _check_unchanged(self, now: AttentionProblem) -> None:
        """Refuse options and workspaces that a captured graph would not see."""
        captured = self._captured_run
        if captured is None:
            return
        check_unchanged(fixed_options(captured.problems[1]), fixed_options(now))
        names = ("float_workspace_buffer", "int_workspace_buffer")
        for name, old, new in zip(
            names, captured.workspaces, self._executor.workspaces, strict=True
        ):
            if old.data_ptr() != new.data_ptr():
                raise ValueError(
                    f"`{name}` must stay what it was when a CUDA graph was captured: the graph "
                    "would not see another"
                )

    def _launch_parts(
        self,
        first: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        second: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        scales: tuple[Scales, Scales],
        return_lse: tuple[bool, bool],
        enable_pdl: bool | None,
    ) -> tuple[Any, Any]:
        """`first`, `second`: q, k and v of either part; `scales`: of these."""
        assert self._problems is not None
        specs = [problem.spec for problem in self._problems]
        factors, head_scales = _scales_of_parts(specs[0], scales, self.device)
        results = [
            _empty_results(name, q, specs[0], lse)
            for name, (q, _, _), lse in zip(
                ("q_p", "q_d"), (first, second), return_lse, strict=True
            )
        ]
        numbers: list[dict[str, Any]] = [
            {
                "sm_scale": spec.sm_scale * logits,
                "v_scale": outputs,
                "window_left": spec.window_left,
            }
            for spec, (logits, outputs) in zip(specs, factors, strict=True)
        ]
        self._executor.set_second(*second, *results[1], **numbers[1])
        self._executor.run(
            *first, *results[0], **numbers[0], enable_pdl=enable_pdl, head_scales=head_scales
        )
        out_p, out_d = (
            (out, lse) if wanted else out
            for (out, lse), wanted in zip(results, return_lse, strict=True)
        )
        return out_p, out_d


def _scales_of_parts(
    spec: AttentionSpec, scales: tuple[Scales, Scales], device: torch.device
) -> tuple[list[tuple[float, float]], Sequence[HeadScales]]:
    """Factors of each part's logits and of its outputs, and each part's tensors of scales."""
    heads = (spec.num_qo_heads, spec.num_kv_heads)
    factors, of_heads = [], []
    for of_part, suffix in zip(scales, ("_p", ""), strict=True):
        names = (f"q_scale{suffix}", f"k_scale{suffix}", f"v_scale{suffix}")
        logits, outputs, found = split_scales(device, *heads, *of_part, names=names)
        factors.append((logits, outputs))
        of_heads.append(found)
    parts = [found[0] if found else HeadScales() for found in of_heads]
    return factors, parts if any(of_heads) else ()


def _empty_results(
    name: str, q: torch.Tensor, spec: AttentionSpec, lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Room for an output and, if it is wanted, its log-sum-exps."""
    check_tensor(name, q)
    shape = (*q.shape[:-1], spec.head_dim_vo)
    out = torch.empty(shape, dtype=spec.o_data_type, device=q.device)
    return out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if lse else None


def with_run_options(spec: AttentionSpec, options: RunOptions, part: str) -> AttentionSpec:
    """The options of a part of a run.

    Raises
    ------
    TypeError, ValueError
        If one is not as it should be; the message names it.
    """
    checked = {
        name: _checked_option(name, value, spec.head_dim_qk, part)
        for name, value in options._asdict().items()
    }
    return dataclasses.replace(spec, **checked)


def check_planned_options(spec: AttentionSpec, options: RunOptions, part: str) -> None:
    """Refuse options of run() that are not those of plan(), unless left at their defaults.

    Raises
    ------
    TypeError, ValueError
        If one is another; the message names it.
    """
    defaults = RunOptions()._asdict()
    for name, value in options._asdict().items():
        if value == defaults[name]:
            continue
        want = getattr(spec, name)
        found = _checked_option(name, value, spec.head_dim_qk, part)
        same = found == want or (
            isinstance(want, float) and math.isclose(found, want, rel_tol=1e-6)
        )
        if not same:
            raise ValueError(f"`{name}_{part}` must be the {want!r} of plan(), got {found!r}")


def _checked_option(name: str, value: Any, head_dim: int, part: str) -> Any:
    with named(**{name: f"{name}_{part}"}):
        if name == "pos_encoding_mode":
            return check_pos_encoding(value)
        if name == "window_left":
            return check_window(value)
        if name == "sm_scale":
            return logits_scale(value, head_dim)
        return positive(name, value, 1.0 if name == "rope_scale" else 1e4)


def mask_of_part(
    problem: AttentionProblem, part: str, mask: Any, packed_mask: Any, device: torch.device
) -> AttentionProblem:
    """The problem of one part with its mask; None for either form without."""
    if mask is None and packed_mask is None:
        return problem
    for name, tensor in (
        (f"custom_mask_{part}", mask),
        (f"packed_custom_mask_{part}", packed_mask),
    ):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise TypeError(f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}")
    if packed_mask is not None:
        mask = None
    with named(custom_mask=f"custom_mask_{part}", packed_custom_mask=f"packed_custom_mask_{part}"):
        flat = None if mask is None else mask.reshape(-1)
        made: CustomMask = make_mask(problem.requests, flat, packed_mask, device)
    return problem.with_mask(made)
