"""What a launch depends on: the module, the memory, and how the work is divided."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, NamedTuple

import torch

from ..._common.checks import tensor as check_tensor
from ...jit.attention.config import AttentionConfig
from ...jit.attention.modules import (
    AttentionModule,
    gen_attention_module,
    get_attention_module,
)
from ...jit.attention.plan import is_planner_built
from .choice import KernelChoice
from .planner import ANY_ROWS
from .requests import AttentionProblem
from .spec import KernelOptions

BlockScales = tuple[torch.Tensor, torch.Tensor | None]
"""Scales of 4-bit keys and of values; None: the first tensor has both."""


class SecondShape(NamedTuple):
    """Options that select code of the second tile shape of a launch."""

    mask_mode: str = "none"
    pos_encoding: str = "none"
    sliding_window: bool = False
    logits_soft_cap: bool = False

    @classmethod
    def of(cls, problem: AttentionProblem) -> SecondShape:
        """Options of the second shape where these requests take it."""
        options, has_window = problem.spec.kernel_options, problem.spec.window_left >= 0
        return cls(problem.mask_mode, options.pos_encoding, has_window, options.logits_soft_cap)


NO_SECOND = SecondShape()


class ModuleKey(NamedTuple):
    """Selects a module; it is quicker to make and to look up than an ``AttentionConfig``."""

    options: KernelOptions
    choice: KernelChoice
    paged: bool
    mask_mode: str
    sliding_window: bool
    second: SecondShape = NO_SECOND
    sinks: bool = False
    head_scales: bool = False
    device_lengths: bool = False

    def with_options(self, sinks: bool, window: bool, head_scales: bool) -> ModuleKey:
        """The module that also has what a run adds."""
        second = self.second
        if window and self.choice.tile_q_second:
            second = second._replace(sliding_window=True)
        return self._replace(
            sliding_window=self.sliding_window or window,
            second=second,
            sinks=sinks,
            head_scales=head_scales,
        )

    @functools.lru_cache(maxsize=256)  # noqa: B019 - keys are few and small
    def config(self) -> AttentionConfig:
        """The same as a configuration, which refuses what there is no kernel for."""
        options, choice = self.options, self.choice
        return AttentionConfig(
            dtype_q=options.dtype_q,
            dtype_kv=options.dtype_kv,
            dtype_o=options.dtype_o,
            head_dim_qk=options.head_dim_qk,
            head_dim_vo=options.head_dim_vo,
            tile_q=choice.tile_q,
            paged=self.paged,
            mask_mode=self.mask_mode,
            pos_encoding=options.pos_encoding,
            sliding_window=self.sliding_window,
            logits_soft_cap=options.logits_soft_cap,
            sinks=self.sinks,
            tile_q_second=choice.tile_q_second,
            mask_mode_second=self.second.mask_mode,
            pos_encoding_second=self.second.pos_encoding,
            sliding_window_second=self.second.sliding_window,
            logits_soft_cap_second=self.second.logits_soft_cap,
            custom_variant=options.variant is not None,
            backend=choice.backend,
            head_scales=self.head_scales,
            device_lengths=self.device_lengths,
            profiled=options.profiled,
        )

    def build_beside_planner(self) -> None:
        """Begin to compile the module if the planner has to be compiled, too.

        Whoever loads the module waits for this, and says what is wrong.
        """
        if is_planner_built():
            return
        spec = gen_attention_module(self.config(), self.options.variant)

        def build() -> None:
            with contextlib.suppress(Exception):
                spec.build()

        threading.Thread(target=build, daemon=True).start()

    def load(self) -> AttentionModule:
        """The module, compiled first if need be."""
        return get_attention_module(self.config(), self.options.variant)


class Workspaces(NamedTuple):
    """Memory of a plan on the device."""

    floats: torch.Tensor  # partial results of requests that are split
    ints: torch.Tensor  # the work list


def check_workspace(name: str, buffer: Any) -> None:
    """Refuse what is no contiguous tensor at a multiple of 16 bytes."""
    check_tensor(name, buffer)
    if not buffer.is_contiguous():
        raise ValueError(f"`{name}` must be contiguous, got strides {buffer.stride()}")
    if buffer.data_ptr() % 16:
        at = hex(buffer.data_ptr())
        raise ValueError(f"{name} must be 16-byte aligned: `{name}` begins at {at}")


class GraphCapacity(NamedTuple):
    """What later plans of a CUDA graph may have."""

    batch_size: int
    qo_tokens: int


class RowRange(NamedTuple):
    """The least and the most packed query rows of the requests that a launch computes."""

    least: int = 0
    most: int = ANY_ROWS


ALL_ROWS = RowRange()


class PlanOptions(NamedTuple):
    """How the work of a batch is divided, whatever the batch.

    Attributes
    ----------
    fixed_split_size : int or None
        Cut keys at multiples of this many tokens and nowhere else.
    disable_split_kv : bool
        Cut nothing.
    capacity : GraphCapacity or None
        With a CUDA graph.
    non_blocking : bool
        Whether to return before the work list is on the GPU.
    """

    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    capacity: GraphCapacity | None = None
    non_blocking: bool = True


NO_OPTIONS = PlanOptions()
