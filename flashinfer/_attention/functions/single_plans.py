"""Plans of the functions for one request, which have neither a workspace nor a plan() of their own.

A plan depends on shapes and options only, so the latest ones are kept and a repeated shape costs a
look-up. They are kept per thread and stream: kernels of one stream run one after another, so its
plans can share a workspace and be overwritten by later ones without a wait.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..checks import HeadScales
from ..plan.executor import AttentionExecutor
from ..plan.launch import BlockScales
from ..plan.requests import AttentionProblem, CustomMask

_PLANS_PER_STREAM = 8

Key = tuple[object, ...]


class _Plan(NamedTuple):
    executor: AttentionExecutor
    # A copy of the work list, if kernels count in it, for the first capture of the plan.
    spare_list: torch.Tensor | None


class _Stream:
    """Plans of one stream, latest last, and the float workspace they share."""

    def __init__(self) -> None:
        self.plans: OrderedDict[Key, _Plan] = OrderedDict()
        self.float_workspace: torch.Tensor | None = None

    def plan(self, key: Key, problem: AttentionProblem, device: torch.device) -> _Plan:
        """A new plan, with the oldest one's executor if there are enough."""
        if self.float_workspace is None:
            self.float_workspace = _bytes(0, device)
        if len(self.plans) < _PLANS_PER_STREAM:
            executor = AttentionExecutor(self.float_workspace, _bytes(1 << 16, device))
        else:
            _, (executor, _) = self.plans.popitem(last=False)
        float_bytes, int_bytes = executor.workspace_size(problem)
        if self.float_workspace.numel() < float_bytes:
            self.float_workspace = _bytes(float_bytes + float_bytes // 2, device)
        ints = executor.workspaces.ints
        if ints.numel() < int_bytes:
            ints = _bytes(2 * int_bytes, device)
        if (
            executor.workspaces.floats is not self.float_workspace
            or executor.workspaces.ints is not ints
        ):
            executor.set_workspaces(self.float_workspace, ints)
        executor.plan(problem)
        assert executor.choice is not None
        counts = executor.choice.backend == "fa3"
        spare_list = executor.workspaces.ints.clone() if counts else None
        self.plans[key] = plan = _Plan(executor, spare_list)
        return plan


class _Plans(threading.local):
    def __init__(self) -> None:
        self.streams: dict[tuple[torch.device, int], _Stream] = {}


_plans = _Plans()
# Plans that captured graphs read, for ever, their work lists, and those that the first captures
# use; by key, so that more captures cost no more plans.
_captured: dict[Key, tuple[AttentionExecutor, torch.Tensor, torch.Tensor | None]] = {}


def executor_for(key: Key, problem: AttentionProblem, device: torch.device) -> AttentionExecutor:
    """The executor with the plan for `problem`.

    Parameters
    ----------
    key : tuple
        All that the plan depends on.

    Raises
    ------
    ValueError
        If a CUDA graph is being captured, and no such call came before.
    """
    if torch.cuda.is_current_stream_capturing():
        return _planned_before(key, device)
    place = (device, torch.cuda.current_stream(device).cuda_stream)
    stream = _plans.streams.get(place)
    if stream is None:
        stream = _plans.streams[place] = _Stream()
    plan = stream.plans.get(key)
    if plan is None:
        return stream.plan(key, problem, device).executor
    stream.plans.move_to_end(key)
    return plan.executor


def _planned_before(key: Key, device: torch.device) -> AttentionExecutor:
    """For a capture: a plan that is not overwritten any more, with memory of the graph's own."""
    known: Key = (device, *key)
    ints: torch.Tensor | None = None
    if known not in _captured:
        for (place, _), stream in _plans.streams.items():
            if place == device and key in stream.plans:
                executor, ints = stream.plans.pop(key)
                _captured[known] = executor, executor.workspaces.ints, ints
                break
        else:
            raise ValueError(
                "a CUDA graph can capture a call only after the same call (shapes, options) has "
                "run outside: it has to be planned"
            )
    executor, plan_list, _ = _captured[known]
    # The kernel for Hopper counts in its work list what is taken: graphs that replay at a time, or
    # branches of one, need lists of their own. The first call has the spare one; others copy the
    # plan's, which no launch counts in any more, at each replay (2 us).
    assert executor.choice is not None
    if executor.choice.backend != "fa3":
        ints = plan_list
    elif ints is None:
        ints = plan_list.clone()
    executor.move_workspaces(_bytes(executor.workspaces.floats.numel(), device), ints)
    return executor


def _bytes(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(max(count, 256), dtype=torch.uint8, device=device)


def run_single(
    problem: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sm_scale: float,
    v_scale: float,
    args: tuple[Any, ...] = (),
    head_scales: Sequence[HeadScales] = (),
    block_scales: BlockScales | None = None,
) -> None:
    """Plan, if need be, and launch.

    Parameters
    ----------
    problem : AttentionProblem
        One ragged request; the scale of its spec is not looked at.
    q, out : torch.Tensor
        ``[qo_len, num_qo_heads, head_dim]``.
    k, v : torch.Tensor
        ``[kv_len, num_kv_heads, head_dim]``, or the first two exchanged for ``"HND"``.
    lse : torch.Tensor, optional
        ``[qo_len, num_qo_heads]`` float32.
    sm_scale, v_scale : float
        All scales folded in.
    args : tuple
        Additional tensors, then scalars, of a variant.
    head_scales : sequence of HeadScales
        Factors besides, in a sequence of one, or none.
    block_scales : tuple, optional
        Scales of 4-bit keys and values.
    """
    if not q.is_cuda:
        raise ValueError(f"`q` must be a CUDA tensor, got one on {q.device}")
    mask = problem.tensors.mask
    key = (q.shape, k.shape, problem.spec, problem.mask_mode)
    executor = executor_for(key, problem, q.device)
    if isinstance(mask, CustomMask):
        executor.set_mask(mask)
    executor.run(
        q,
        k,
        v,
        out,
        lse,
        sm_scale=sm_scale,
        v_scale=v_scale,
        window_left=problem.spec.window_left,
        additional=args,
        head_scales=head_scales,
        block_scales=block_scales,
    )
