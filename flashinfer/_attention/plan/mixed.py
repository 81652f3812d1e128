"""Batches in which some requests decode and others prefill, in one launch or in two."""

from __future__ import annotations

from typing import Any

import torch

from ...jit.attention.config import choose_tile_q
from .choice import KernelChoice, estimate, hopper_choice, possible_backend
from .executor import AttentionExecutor
from .launch import ALL_ROWS, RowRange
from .planner import ANY_ROWS, KernelEstimate
from .requests import AttentionProblem

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
        self._decoder: AttentionExecutor | None = None  # made for the first plan of two launches
        self._is_apart = False
        self.profiler_buffer: torch.Tensor | None = None  # of the next run

    def plan_mixed(self, problem: AttentionProblem) -> None:
        """`plan`, of any batch whose requests have query lengths of their own."""
        self._is_apart = False
        spec = problem.spec
        backend = possible_backend(spec, self.device)
        if backend == "fa3":
            _plan_and_grow(self, problem, hopper_choice(spec))
            return
        # Heads of more than 256 have the decode tile only.
        second = DECODE_ROWS if spec.tile_head_dim <= 256 else 0
        found = estimate(spec, problem.requests, second, False, backend == "auto")
        # One launch fills the buffer of a profile.
        if found.few_rows > 0 and _is_faster_apart(found) and not spec.profiled:
            self._plan_apart(problem, found.few_rows)
        elif found.hopper_us < found.portable_us:
            _plan_and_grow(self, problem, hopper_choice(spec))
        else:
            second = second if found.few_rows > 0 else 0
            _plan_and_grow(self, problem, KernelChoice("fa2", found.tile_q, second))

    def _plan_apart(self, problem: AttentionProblem, few_rows: int) -> None:
        """Two launches; `few_rows`: the most of the requests that fit the decode tile."""
        if self._decoder is None:
            workspace = torch.empty(FIRST_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
            self._decoder = AttentionExecutor(workspace)
        tile_q = choose_tile_q(few_rows, few_rows, problem.spec.tile_head_dim)
        decode, rows = KernelChoice("fa2", tile_q), RowRange(0, few_rows)
        _plan_and_grow(self._decoder, problem, decode, rows)
        others = RowRange(few_rows + 1, ANY_ROWS)
        _plan_and_grow(self, problem, hopper_choice(problem.spec), others)
        self._is_apart = True

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        **options: Any,
    ) -> None:
        """As `AttentionExecutor.run`; events go to `profiler_buffer` if they were planned."""
        if self.profiler_buffer is not None:
            buffer, self.profiler_buffer = self.profiler_buffer, None
            self._planned_module().profile(self._launch, buffer, out, lse)
        if self._is_apart:
            assert self._decoder is not None
            self._decoder.run(q, k, v, out, lse, **options)
        super().run(q, k, v, out, lse, **options)


def _is_faster_apart(found: KernelEstimate) -> bool:
    return found.apart_us < min(found.portable_us, found.hopper_us)


def _plan_and_grow(
    executor: AttentionExecutor,
    problem: AttentionProblem,
    choice: KernelChoice,
    rows: RowRange = ALL_ROWS,
) -> None:
    try:
        executor.plan(problem, choice=choice, rows=rows)
    except ValueError:
        needed = executor.workspace_size(problem, choice=choice, rows=rows)
        if not _grow(executor, needed):
            raise
        executor.plan(problem, choice=choice, rows=rows)


def _grow(executor: AttentionExecutor, needed: tuple[int, int]) -> bool:
    """Larger workspaces where they are too small; whether any was."""
    buffers = (executor.workspaces.floats, executor.workspaces.ints)
    if all(count <= buffer.nbytes for count, buffer in zip(needed, buffers, strict=True)):
        return False
    sizes = [
        buffer.nbytes if count <= buffer.nbytes else 1 << (count - 1).bit_length()
        for count, buffer in zip(needed, buffers, strict=True)
    ]
    floats, ints = (torch.empty(n, dtype=torch.uint8, device=executor.device) for n in sizes)
    executor.set_workspaces(floats, ints)
    return True
