"""The planner of attention launches: its module, and the object that holds one plan.

The planner is ``include/flashinfer/scheduler/attention_plan.h``. What a plan contains, and the
arguments of the functions behind this file, stand at the head of
``csrc/attention_plan_jit_binding.cc``.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from ..config import ModuleConfig
from ..core import JitSpec
from ..registry import register_generator

# What a wrapper calls the arguments of a group of requests, for errors.
DECODE, PREFILL, RAGGED, BATCH_ATTENTION, POD_PREFILL, POD_DECODE = range(6)

# Positions in plan_info.
NUM_CTAS = 0
NUM_MERGES = 1
ROWS_PER_SLOT = 2
ITEMS_OFFSET = 3
MERGES_OFFSET = 4
NUM_SLOTS = 5
INT_BYTES = 6
FLOAT_BYTES = 7
QO_TOKENS = 8
BATCH_SIZE = 9
KV_ENTRIES = 10
TILE_Q = 11
QO_TOKENS_SECOND = 12
BATCH_SIZE_SECOND = 13
KV_ENTRIES_SECOND = 14
SUMS_OFFSET = 15
MERGED_ROWS = 16
PLAN_INFO_SIZE = 17

ANY_ROWS = 2**31 - 1
"""As the most rows of a request: any number."""

Group = tuple[
    int,
    "torch.Tensor | None",
    torch.Tensor,
    "torch.Tensor | None",
    "torch.Tensor | None",
    int,
    bool,
    int,
    int,
]
"""Requests that share tensors and masks: naming (`DECODE`, ...), qo_indptr, kv_indptr, kv_len,
last_page_len, page_size, causal, window_left, tokens_per_request."""


@dataclass(frozen=True)
class AttentionPlanConfig(ModuleConfig):
    """Nothing selects code: the planner is the same for every kernel."""

    module: ClassVar[str] = "attention_plan"


def _configs() -> Iterator[AttentionPlanConfig]:
    yield AttentionPlanConfig()


@register_generator(aot=_configs, presets={"llama-bf16": _configs})
def gen_attention_plan_module(config: AttentionPlanConfig | None = None) -> JitSpec:
    """The module with the ``attention_plan`` functions; it has no device code."""
    return JitSpec.from_config(config or AttentionPlanConfig(), ["attention_plan_jit_binding.cc"])


@functools.cache
def get_attention_plan_module() -> Any:
    """The loaded module, compiled first if need be."""
    return gen_attention_plan_module().build_and_load()


_of_thread = threading.local()  # what `estimate_kernels` writes to


class Estimate(NamedTuple):
    """What ``attention_choice.h`` says of the kernels for a batch.

    Attributes
    ----------
    tile_q : float
        Packed query rows of a tile of the portable kernel.
    portable_us, hopper_us : float
        Microseconds of a launch with it, and of one of the kernel for Hopper.
    apart_us : float
        Of two: of the former for the requests that fit the second tile, of the latter for the
        others. Infinite if the batch has one tile.
    few_rows : float
        The most packed query rows of the requests that fit the second tile; 0 if the batch has one
        tile, as all requests fit it or none does.
    """

    tile_q: float
    portable_us: float
    hopper_us: float
    apart_us: float
    few_rows: float


def estimate_kernels(model: torch.Tensor, group: Group) -> Estimate:
    """What takes how long for a batch.

    Parameters
    ----------
    model : torch.Tensor
        ``[24 + 9 n]`` float64 on the CPU: the fields of ``KernelModel``, for n tiles of the
        portable kernel.
    group : tuple
        The requests, as for `AttentionPlan.plan`.

    Returns
    -------
    Estimate
        If the model says that Hopper's start is infinite, the other times are not computed either.

    Raises
    ------
    TypeError, ValueError
        If an index tensor is not as described there, or lengths contradict each other.
    """
    choice = _of_thread.__dict__.get("choice")
    if choice is None:
        choice = _of_thread.choice = torch.empty(5, dtype=torch.float64)
    get_attention_plan_module().attention_choose(choice, model, *group)
    return Estimate(*choice.tolist())


class AttentionPlan:
    """A plan, with scratch and staging memory of its own. One thread at a time may use it.

    Attributes
    ----------
    info : torch.Tensor
        ``[17]`` int64 on the CPU: sizes and offsets of the latest plan, by the positions
        ``NUM_CTAS``, ``NUM_MERGES``, ... of this file. The same tensor for the life of the object.
    """

    def __init__(self) -> None:
        module = get_attention_plan_module()
        handle = torch.zeros(1, dtype=torch.int64)
        module.attention_plan_create(handle)
        self._handle = int(handle.item())
        self._configure = module.attention_plan_configure
        self._plan = module.attention_plan
        self._configuration: tuple[int, ...] | None = None
        self.info = torch.zeros(PLAN_INFO_SIZE, dtype=torch.int64)
        # The module is kept alive by the callback.
        weakref.finalize(self, module.attention_plan_destroy, self._handle)

    def configure(
        self,
        num_kv_heads: int,
        group_size: int,
        head_dim_vo: int,
        tile_q: int,
        cta_slots: int,
        tile_q_second: int = 0,
        tile_kv: int = 64,
        fixed_split_size: int = 0,
        disable_split_kv: bool = False,
        graph_batch_size: int = -1,
        graph_qo_tokens: int = 0,
        graph_qo_len: int = 0,
        lone_speed: int = 1,
        piece_tiles: int = 1,
        least_rows: int = 0,
        most_rows: int = ANY_ROWS,
    ) -> None:
        """Say what does not depend on the batch; nothing happens if it is what was said last.

        Parameters
        ----------
        num_kv_heads : int
            KV heads of the launch.
        group_size : int
            Query heads of each KV head.
        head_dim_vo : int
            Elements of an output row, for the size of the float workspace.
        tile_q : int
            Packed query rows (token and head of the group) of a tile.
        cta_slots : int
            CTAs that the GPU holds at a time: multiprocessors times CTAs on each.
        tile_q_second : int
            Rows of a tile of kind 1; 0 if the launch has one shape.
        tile_kv : int
            Tokens of a KV tile.
        fixed_split_size : int
            Cut every request at the multiples of this many tokens, rounded up to a multiple of
            `tile_kv`, and nowhere else; 0 leaves cutting to the planner.
        disable_split_kv : bool
            Cut nothing.
        graph_batch_size, graph_qo_tokens : int
            Capacity of a CUDA graph in requests and in query tokens; a batch size of -1 means
            that there is no graph.
        graph_qo_len : int
            Most query tokens of one request in a CUDA graph, which saves workspace and merging;
            0 means up to `graph_qo_tokens`.
        lone_speed : int
            How many times as fast a CTA is that has a multiprocessor to itself.
        piece_tiles : int
            KV tiles that starting and ending a work item takes as long as.
        least_rows, most_rows : int
            Packed query rows of the requests that are planned; the others are left out.

        Raises
        ------
        ValueError
            If a number is out of range, or both ways to control splitting are asked for.
        """
        configuration = (
            num_kv_heads,
            group_size,
            head_dim_vo,
            tile_q,
            cta_slots,
            tile_q_second,
            tile_kv,
            fixed_split_size,
            disable_split_kv,
            graph_batch_size,
            graph_qo_tokens,
            graph_qo_len,
            lone_speed,
            piece_tiles,
            least_rows,
            most_rows,
        )
        if configuration != self._configuration:
            self._configure(self._handle, *configuration)
            self._configuration = configuration

    def plan(
        self,
        int_workspace: torch.Tensor | None,
        float_workspace_bytes: int,
        group: Group,
        second: Group | tuple[()] = (),
    ) -> torch.Tensor:
        """Plan a batch, and copy the work list to the GPU on the current stream.

        Parameters
        ----------
        int_workspace : torch.Tensor or None
            Where the work list goes, contiguous, at a multiple of 16 bytes. A CPU tensor is
            written in place; None plans without writing.
        float_workspace_bytes : int
            Size of the float workspace; negative if it is not to be checked.
        group : tuple
            The requests, see `Group`. Index tensors are int32, one-dimensional, contiguous and on
            the host. ``qo_indptr`` None: every request has ``tokens_per_request`` tokens.
            ``page_size`` 0: ``kv_indptr`` counts rows of ragged keys. Otherwise lengths come from
            ``kv_len`` or ``last_page_len``; given both they must agree.
        second : tuple, optional
            Requests of kind 1 that have tensors of their own.

        Returns
        -------
        torch.Tensor
            `info`.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, lengths contradict each other, a CUDA graph's
            capacity is exceeded, or a workspace is too small (the message says the needed and the
            given bytes). Nothing has been copied then.
        """
        self._plan(self._handle, self.info, int_workspace, float_workspace_bytes, *group, *second)
        return self.info

    def bytes_needed(self, group: Group, second: Group | tuple[()] = ()) -> tuple[int, int]:
        """Bytes of the float and of the int workspace that `plan` would need."""
        info = self.plan(None, -1, group, second)
        return int(info[FLOAT_BYTES]), int(info[INT_BYTES])
