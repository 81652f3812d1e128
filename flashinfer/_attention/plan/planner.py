"""The native planner: ``include/flashinfer/scheduler/attention_plan.h``.

The head of ``csrc/attention_plan_jit_binding.cc`` lists the arguments of the native functions.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from ..._common.driver import get_stream_sm_count
from ...jit.attention.device_plan import get_attention_device_plan_module
from ...jit.attention.modules import AttentionModule, CtaSlots
from ...jit.attention.plan import get_attention_plan_module
from .requests import AttentionProblem, CustomMask, DeviceLengths, DraftMask, ItemScoring, Requests

ANY_ROWS = 2**31 - 1
"""As the most rows of a request: any number."""


class PlanConfig(NamedTuple):
    """Everything that a plan depends on besides the requests: ``PlanConfig`` of the header.

    Attributes
    ----------
    num_kv_heads : int
        KV heads of the launch.
    group_size : int
        Query heads of each KV head.
    head_dim_vo : int
        Elements of an output row, for the size of the float workspace.
    tile_q : int
        Packed query rows (token and head of the group) of a tile.
    tile_q_second : int
        Rows of a tile of kind 1; 0 if the launch has one shape.
    tile_kv : int
        Tokens of a KV tile, a power of two.
    piece_tiles : int
        KV tiles that starting and ending a work item takes as long as.
    cta_slots : int
        CTAs that the GPU holds at a time: multiprocessors times CTAs on each.
    lone_speed : int
        How many times as fast a CTA is that has a multiprocessor to itself.
    fixed_split_size : int
        Cut every request at the multiples of this many tokens, rounded up to a multiple of
        `tile_kv`, and nowhere else; 0 leaves cutting to the planner.
    disable_split_kv : bool
        Cut nothing.
    graph_batch_size, graph_qo_tokens : int
        Capacity of a CUDA graph in requests and in query tokens; a batch size of -1 means that
        there is no graph.
    graph_qo_len : int
        Most query tokens of one request in a CUDA graph, which saves workspace and merging; 0
        means up to `graph_qo_tokens`.
    least_rows, most_rows : int
        Packed query rows of the requests that are planned; the others are left out.
    """

    num_kv_heads: int
    group_size: int
    head_dim_vo: int
    tile_q: int
    tile_q_second: int
    tile_kv: int
    piece_tiles: int = 1
    cta_slots: int = 264
    lone_speed: int = 1
    fixed_split_size: int = 0
    disable_split_kv: bool = False
    graph_batch_size: int = -1
    graph_qo_tokens: int = 0
    graph_qo_len: int = 0
    least_rows: int = 0
    most_rows: int = ANY_ROWS


class KernelEstimate(NamedTuple):
    """Estimated times of the kernels for a batch: ``KernelEstimate`` of ``attention_choice.h``.

    Attributes
    ----------
    tile_q : int
        Packed query rows of a tile of the portable kernel.
    portable_us, hopper_us : float
        Microseconds of a launch of the portable kernel, and of one of the kernel for Hopper.
    apart_us : float
        Microseconds of two launches: the portable kernel serves the requests that fit the second
        tile, the kernel for Hopper the others. Infinite if the batch has one tile.
    few_rows : int
        The most packed query rows of the requests that fit the second tile; 0 if the batch has one
        tile, as all requests fit it or none does.
    """

    tile_q: int
    portable_us: float
    hopper_us: float
    apart_us: float
    few_rows: int


ESTIMATE_DTYPE = np.dtype(
    [
        ("tile_q", np.int64),
        ("portable_us", np.float64),
        ("hopper_us", np.float64),
        ("apart_us", np.float64),
        ("few_rows", np.int64),
    ]
)

_of_thread = threading.local()  # the bytes that `estimate_kernels` reads its result from


def estimate_kernels(model: torch.Tensor, requests: Requests) -> KernelEstimate:
    """Estimate how long each kernel takes for a batch.

    Parameters
    ----------
    model : torch.Tensor
        The bytes of a ``KernelModel``, as `speeds.kernel_model` makes them.
    requests : Requests
        The batch.

    Returns
    -------
    KernelEstimate
        If the model says that Hopper's start is infinite, the other times are not computed either.

    Raises
    ------
    TypeError, ValueError
        If an index tensor is not as described in `Requests`, or lengths contradict each other.
    """
    bytes_ = _of_thread.__dict__.get("bytes")
    if bytes_ is None:
        bytes_ = _of_thread.bytes = torch.zeros(ESTIMATE_DTYPE.itemsize, dtype=torch.uint8)
        _of_thread.record = bytes_.numpy().view(ESTIMATE_DTYPE)
    get_attention_plan_module().attention_estimate(bytes_, model, *requests)
    return KernelEstimate(*_of_thread.record.item())


def slots_of_stream(module: AttentionModule, workspace: torch.Tensor) -> CtaSlots:
    """The CTAs that the multiprocessors of the current stream hold at a time."""
    if torch.cuda.current_stream(workspace.device).cuda_stream == 0:
        return module.cta_slots(workspace)  # the default stream has them all
    return module.cta_slots(workspace, get_stream_sm_count(workspace.device))


class AttentionPlanner:
    """One plan at a time, with scratch and staging memory of its own. Not thread-safe.

    Attributes
    ----------
    layout : torch.Tensor
        The bytes of the latest plan's ``PlanLayout`` (``scheduler/plan_layout.h``), uint8 on the
        CPU. The same tensor for the life of the object.
    config : PlanConfig or None
        The planner's latest configuration.
    config_source : tuple or None
        The values that the owner made `config` from; comparing them is quicker than making one.
    """

    def __init__(self) -> None:
        module = get_attention_plan_module()
        self._native = torch.zeros(module.attention_planner_size(), dtype=torch.uint8)
        self.layout = torch.zeros(module.attention_plan_layout_size(), dtype=torch.uint8)
        self.config: PlanConfig | None = None
        self.config_source: tuple[object, ...] | None = None
        module.attention_plan_create(self._native, self.layout)
        self._configure = module.attention_plan_configure
        self._plan = module.attention_plan
        self._plan_second = module.attention_plan_second
        self._plan_visible = module.attention_plan_visible
        self._float_bytes = module.attention_plan_float_bytes
        self._int_bytes = module.attention_plan_int_bytes
        # The callback keeps the module and both tensors alive until it has run.
        weakref.finalize(self, _destroy, module, self._native, self.layout)

    def configure(self, config: PlanConfig) -> None:
        """Say what does not depend on the batch; nothing happens if it is what was said last.

        Raises
        ------
        ValueError
            If a number is out of range.
        """
        if config != self.config:
            fields = np.array(config, dtype=np.int64)
            self._configure(self._native, torch.from_numpy(fields.view(np.uint8)))
            self.config = config

    def plan(
        self,
        int_workspace: torch.Tensor | None,
        float_workspace_bytes: int,
        requests: Requests,
        second: Requests | None = None,
        visible: torch.Tensor | None = None,
    ) -> None:
        """Plan a batch, and copy the work list to the GPU on the current stream.

        Parameters
        ----------
        int_workspace : torch.Tensor or None
            Where the work list goes, contiguous, at a multiple of 16 bytes. A CPU tensor is
            written in place; None plans without writing.
        float_workspace_bytes : int
            Size of the float workspace; negative if it is not to be checked.
        requests : Requests
            The batch, or its requests of kind 0.
        second : Requests, optional
            Requests of kind 1 that have tensors of their own.
        visible : torch.Tensor, optional
            ``[query tokens, 2]`` int32 on the CPU, of `requests`: the first key that each query
            sees by a custom mask, and the one after the last. Tiles of other keys are left out.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, lengths contradict each other, a CUDA graph's
            capacity is exceeded, or a workspace is too small (the message says the needed and the
            given bytes). Nothing has been copied then.
        """
        if second is not None:
            self._plan_second(self._native, *second)
        if visible is not None:
            self._plan_visible(self._native, visible)
        self._plan(self._native, int_workspace, float_workspace_bytes, *requests)

    def plan_on_device(
        self,
        int_workspace: torch.Tensor,
        float_workspace_bytes: int,
        bounds: Requests,
        lengths: DeviceLengths,
    ) -> None:
        """Plan requests with lengths on the GPU, by a kernel on the current stream.

        Parameters
        ----------
        int_workspace, float_workspace_bytes
            As for `plan`.
        bounds : Requests
            Requests that are no smaller; the planner is configured for a CUDA graph.
        lengths : DeviceLengths
            The lengths; what they exceed of `bounds` is left out.

        Raises
        ------
        TypeError, ValueError
            As `plan` does.
        """
        self.plan(None, float_workspace_bytes, bounds)
        layout, config, *others = self.divided(bounds, lengths)
        get_attention_device_plan_module().attention_device_plan(
            layout, config, int_workspace, *others
        )

    def divided(self, bounds: Requests, lengths: DeviceLengths) -> tuple[Any, ...]:
        """Native functions that divide planned `bounds` by lengths on the GPU take these."""
        return (
            self.layout,
            torch.from_numpy(np.array(self.config, dtype=np.int64).view(np.uint8)),
            lengths.qo_indptr,
            lengths.kv_indptr,
            lengths.kv_len,
            lengths.last_page_len,
            bounds.page_size,
            lengths.most_qo_len,
            bounds.causal,
            max(bounds.window_left, -1),
        )

    def bytes_needed(self, requests: Requests, second: Requests | None = None) -> tuple[int, int]:
        """Bytes of the float and of the int workspace that `plan` would need."""
        self.plan(None, -1, requests, second)
        return self._float_bytes(self._native), self._int_bytes(self._native)


def bind(
    module: AttentionModule,
    launch: torch.Tensor,
    layout: torch.Tensor,
    workspaces: tuple[torch.Tensor, torch.Tensor],
    problem: AttentionProblem,
    second: AttentionProblem | None,
    has_capacity: bool,
) -> None:
    """Put everything that a plan fixes into the bytes of a launch.

    Parameters
    ----------
    launch, layout : torch.Tensor
        The bytes of the launch, and of the plan's layout.
    workspaces : tuple of torch.Tensor
        For partial results, and with the work list.
    has_capacity : bool
        Whether a CUDA graph's queries may have more rows than the plan.
    """
    spec, requests, tensors = problem
    floats, ints = workspaces
    module.bind(
        launch,
        layout,
        ints,
        floats,
        tensors.kv_indices,
        spec.num_qo_heads,
        spec.num_kv_heads,
        requests.page_size,
        spec.kv_layout == "HND",
        has_capacity,
    )
    mask = tensors.mask
    if second is not None:
        rows = int(requests.kv_lengths()[0]) if tensors.rows_as_pages else -1
        is_hnd = second.spec.kv_layout == "HND"
        module.bind_second(launch, layout, second.tensors.kv_indices, is_hnd, rows)
        mask = mask or second.tensors.mask
    for kind, part in enumerate((problem,) if second is None else (problem, second)):
        own, slopes = part.spec, part.tensors.alibi_slopes
        if own.logits_soft_cap > 0.0 or own.pos_encoding_mode != "NONE":
            numbers = (own.logits_soft_cap, own.rope_scale, own.rope_theta)
            module.options(launch, kind, *numbers, slopes)
    if isinstance(mask, CustomMask):
        module.mask(launch, mask.bits, mask.indptr)
    elif isinstance(mask, DraftMask):
        module.mask(launch, mask.words.view(torch.uint8), None)
    elif isinstance(mask, ItemScoring):
        module.items(launch, *mask)


def _destroy(module: object, native: torch.Tensor, layout: torch.Tensor) -> None:
    module.attention_plan_destroy(native)  # type: ignore[attr-defined]
