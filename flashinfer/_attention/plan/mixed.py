"""Batches in which some requests decode and others prefill, in one launch or in two."""

from __future__ import annotations

from typing import Any

import torch

from ...jit.attention.config import choose_tile_q
from ...jit.attention.hopper import hopper_tile_q
from ...jit.attention.plan import ANY_ROWS, Estimate
from .choice import estimate, possible_backend
from .executor import ALL_ROWS, AttentionExecutor, check_heads
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
        check_heads(problem)
        backend = possible_backend(problem, self.device)
        hopper = "fa3", hopper_tile_q(problem.head_dim_qk, problem.head_dim_vo, problem.q_data_type)
        if backend == "fa3":
            _plan_and_grow(self, problem, kernel=hopper)
            return
        # Heads of more than 256 have the decode tile only.
        second = DECODE_ROWS if problem.head_dim_vo <= 256 else 0
        found = estimate(problem, second, False, backend == "auto")
        few_rows = int(found.few_rows)
        if few_rows > 0 and _is_faster_apart(found):
            self._plan_apart(problem, few_rows, hopper)
        elif found.hopper_us < found.portable_us:
            _plan_and_grow(self, problem, kernel=hopper)
        else:
            second = second if few_rows > 0 else 0
            _plan_and_grow(self, problem, second, kernel=("fa2", int(found.tile_q)))

    def _plan_apart(
        self, problem: AttentionProblem, few_rows: int, hopper: tuple[str, int]
    ) -> None:
        """Two launches; `few_rows`: the most of the requests that fit the decode tile."""
        if self._decoder is None:
            workspace = torch.empty(FIRST_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
            self._decoder = AttentionExecutor(workspace)
        few = "fa2", choose_tile_q(few_rows, few_rows, problem.head_dim_vo)
        _plan_and_grow(self._decoder, problem, kernel=few, rows=(0, few_rows))
        _plan_and_grow(self, problem, kernel=hopper, rows=(few_rows + 1, ANY_ROWS))
        self._is_apart = True

    def run(self, *args: Any, **kwargs: Any) -> None:
        """As `AttentionExecutor.run`."""
        if self._is_apart:
            assert self._decoder is not None
            self._decoder.run(*args, **kwargs)
        super().run(*args, **kwargs)


def _is_faster_apart(found: Estimate) -> bool:
    return found.apart_us < min(found.portable_us, found.hopper_us)


def _plan_and_grow(
    executor: AttentionExecutor,
    problem: AttentionProblem,
    second: int = 0,
    *,
    kernel: tuple[str, int],
    rows: tuple[int, int] = ALL_ROWS,
) -> None:
    try:
        executor.plan(problem, tile_q_second=second, kernel=kernel, rows=rows)
    except ValueError:
        needed = executor.workspace_size(problem, tile_q_second=second, kernel=kernel, rows=rows)
        if not _grow(executor, *needed):
            raise
        executor.plan(problem, tile_q_second=second, kernel=kernel, rows=rows)


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
