"""Batches in which some requests decode and others prefill, in one launch or in two."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..jit.attention.plan import estimate_kernels
from .backends import kernel_model_of, possible_backend
from .executor import AttentionExecutor
from .problem import AttentionProblem

DECODE_ROWS = 16
"""Packed query rows that the decode tile of the portable kernel takes."""

FIRST_WORKSPACE_BYTES = 1 << 20


class MixedExecutor(AttentionExecutor):
    """An executor whose workspaces grow with the plans, and which may launch twice.

    Requests of up to ``DECODE_ROWS`` packed query rows are computed by a second executor where the
    portable kernel is faster with them and the kernel for Hopper with the others: both write their
    requests' rows of one output, one after the other.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor) -> None:
        super().__init__(float_workspace_buffer)
        self._decoder: AttentionExecutor | None = None  # has run once
        self._is_apart = False

    def plan_mixed(self, problem: AttentionProblem) -> None:
        """`plan`, of any batch whose requests have query lengths of their own."""
        self._is_apart = False
        second = second_tile(problem)
        if second == 0 or not _is_faster_apart(problem, self.device, second):
            _plan_and_grow(self, problem, second)
            return
        rows = problem.qo_lengths() * problem.group_size
        most = int(rows[rows <= second].max())  # which decides the tile
        few = dataclasses.replace(problem, backend="fa2", most_rows=most)
        rest = dataclasses.replace(problem, backend="fa3", least_rows=second + 1)
        if self._decoder is None:
            workspace = torch.empty(FIRST_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
            self._decoder = AttentionExecutor(workspace)
        _plan_and_grow(self._decoder, few, 0)
        _plan_and_grow(self, rest, 0)
        self._is_apart = True

    def run(self, *args: Any, **kwargs: Any) -> None:
        """As `AttentionExecutor.run`."""
        if self._is_apart:
            assert self._decoder is not None
            self._decoder.run(*args, **kwargs)
        super().run(*args, **kwargs)


def second_tile(problem: AttentionProblem) -> int:
    """The decode tile where some requests fit it and others do not; 0 where one shape does."""
    if problem.head_dim_vo > 256:
        return 0  # that one has the decode tile only
    rows = problem.qo_lengths() * problem.group_size
    mixed = bool(((rows > 0) & (rows <= DECODE_ROWS)).any()) and bool((rows > DECODE_ROWS).any())
    return DECODE_ROWS if mixed else 0


def _is_faster_apart(problem: AttentionProblem, device: torch.device, second: int) -> bool:
    if possible_backend(problem, device) != "auto":
        return False
    model = kernel_model_of(problem, second, False, True)
    _, portable_us, hopper_us, apart_us = estimate_kernels(model, problem.group())
    return apart_us < min(portable_us, hopper_us)


def _plan_and_grow(executor: AttentionExecutor, problem: AttentionProblem, second: int) -> None:
    try:
        executor.plan(problem, tile_q_second=second)
    except ValueError:
        needed = executor.workspace_size(problem, tile_q_second=second)
        if not _grow(executor, *needed):
            raise
        executor.plan(problem, tile_q_second=second)


def _grow(executor: AttentionExecutor, float_bytes: int, int_bytes: int) -> bool:
    """Larger workspaces where they are too small; whether any was."""
    buffers = (executor.float_workspace, executor.int_workspace)
    if all(n <= b.nbytes for n, b in zip((float_bytes, int_bytes), buffers, strict=True)):
        return False
    sizes = [
        buffer.nbytes if needed <= buffer.nbytes else 1 << (needed - 1).bit_length()
        for needed, buffer in zip((float_bytes, int_bytes), buffers, strict=True)
    ]
    new = [torch.empty(size, dtype=torch.uint8, device=executor.device) for size in sizes]
    executor.set_workspaces(*new)
    return True
