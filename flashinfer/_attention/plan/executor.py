"""Plans and launches attention: the state of every wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...jit.attention.config import AttentionConfig
from ...jit.attention.modules import AttentionModule, CtaSlots
from ..checks import HeadScales
from .choice import KernelChoice, choose_kernel
from .gathering import Gathering, is_worth_gathering
from .launch import (
    ALL_ROWS,
    NO_OPTIONS,
    NO_SECOND,
    BlockScales,
    ModuleKey,
    PlanOptions,
    RowRange,
    SecondShape,
    Workspaces,
    check_workspace,
)
from .no_kernel import NO_MODULE, is_computed_from_plans
from .planner import AttentionPlanner, PlanConfig, bind, slots_of_stream
from .requests import AttentionProblem, CustomMask, DeviceLengths
from .spec import KernelOptions
from .tiles import kv_tiles

INT_WORKSPACE_BYTES = 8 << 20
"""Work lists of some 100,000 tiles."""

_NOMINAL_CTA_SLOTS = CtaSlots(264, 1)  # for plans without a GPU


class AttentionExecutor:
    """One plan and the workspaces it uses; one thread at a time.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Contiguous, of any dtype, for partial results of split requests. Its device is the
        executor's.
    int_workspace_buffer : torch.Tensor, optional
        For the work list; 8 MiB are allocated if there is none.

    Attributes
    ----------
    problem : AttentionProblem or None
        The latest plan's.
    choice : KernelChoice or None
        The kernel of the latest plan.
    workspaces : Workspaces
        Memory that the next plan uses.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor | None = None,
    ) -> None:
        self.problem: AttentionProblem | None = None
        self._options = NO_OPTIONS
        self._planner: AttentionPlanner | None = None
        self._checker: AttentionPlanner | None = None
        self._launch = torch.zeros(0, dtype=torch.uint8)  # what runs start
        self._modules: dict[ModuleKey, AttentionModule] = {}
        self._key: ModuleKey | None = None
        self._run: Callable[..., None] = _plan_first
        self._gathering: Gathering | None = None  # what precedes the launch
        self._follows_a_kernel = False  # the work list is written by a kernel, not by a copy
        self._lengths: DeviceLengths | None = None  # that launches read in place of a list
        # The kernel that a CUDA graph keeps, and what it was chosen for.
        self._graph_choice: tuple[KernelOptions, bool, KernelChoice] | None = None
        self._graph_slots: dict[ModuleKey, CtaSlots] = {}  # so captured launches keep their CTAs
        self.set_workspaces(float_workspace_buffer, int_workspace_buffer)

    @property
    def config(self) -> AttentionConfig:
        """Configuration of the module that the latest plan chose."""
        assert self._key is not None
        return self._key.config()

    @property
    def choice(self) -> KernelChoice | None:
        return None if self._key is None else self._key.choice

    def set_workspaces(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None
    ) -> None:
        """Use these from the next plan on; an int workspace is allocated if none is given."""
        check_workspace("float_workspace_buffer", float_workspace_buffer)
        self.device = float_workspace_buffer.device
        if int_workspace_buffer is None:
            int_workspace_buffer = torch.empty(
                INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
            )
        check_workspace("int_workspace_buffer", int_workspace_buffer)
        if int_workspace_buffer.device != self.device:
            raise ValueError(
                f"`int_workspace_buffer` must be on {self.device} as `float_workspace_buffer` is, "
                f"got {int_workspace_buffer.device}"
            )
        self.workspaces = Workspaces(float_workspace_buffer, int_workspace_buffer)
        self._float_bytes = float_workspace_buffer.numel() * float_workspace_buffer.element_size()
        self._run = _plan_first

    def move_workspaces(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        """Let the latest plan use others: `floats` as large as before, `ints` with its list."""
        assert self.problem is not None and self._key is not None
        self.workspaces = Workspaces(floats, ints)
        if self._gathering is not None:
            self._gathering.place(floats)
        launched = self.problem if self._gathering is None else self._gathering.problem
        self._bind(self._modules[self._key], launched, None)

    # --- Planning -----------------------------------------------------------------------------

    def plan(
        self,
        problem: AttentionProblem,
        options: PlanOptions = NO_OPTIONS,
        *,
        second: AttentionProblem | None = None,
        choice: KernelChoice | None = None,
        rows: RowRange = ALL_ROWS,
    ) -> None:
        """Choose a module, plan, and start the copy of the work list to the GPU.

        Parameters
        ----------
        problem : AttentionProblem
            The requests.
        options : PlanOptions
            How their work is divided.
        second : AttentionProblem, optional
            More requests in the same launch that have tensors and options of their own, always
            paged; heads, dtypes and page size are those of `problem`. At most one of the two has
            a custom mask.
        choice : KernelChoice, optional
            The kernel, where the caller has chosen; with a second tile and without `second`, that
            tile is for the requests of `problem` that fit it.
        rows : RowRange
            Which requests are computed; another launch computes the others.

        Raises
        ------
        ValueError
            If the plan is impossible, a workspace is too small (which says the bytes that are
            needed) or not on a GPU.
        """
        gathering, decodes = None, problem.requests.qo_indptr is None
        if not decodes and second is None and choice is None and rows is ALL_ROWS:
            gathering = self._gathering_for(problem, options)
        launched = problem if gathering is None else gathering.problem
        self._plan(launched, options, second, choice, rows)
        if gathering is not None:
            gathering.place(self.workspaces.floats)
            self.problem, self._gathering = problem, gathering

    def _plan(
        self,
        problem: AttentionProblem,
        options: PlanOptions,
        second: AttentionProblem | None,
        choice: KernelChoice | None,
        rows: RowRange,
    ) -> None:
        """`plan` of what is launched."""
        key = self._module_key(problem, second, options, choice)
        self._options = options
        self.problem = self._gathering = self._lengths = None
        self._run, self._follows_a_kernel = _plan_first, False
        requests, seconds = problem.requests, None if second is None else second.requests
        if self.device.type != "cuda":
            self._plan_without_gpu(problem, second, key, rows)
            return
        module = self._modules.get(key)
        if module is None:
            key.build_beside_planner()
            # What is wrong with the request is said before anything else is compiled.
            planner = self._configured(problem, key, _NOMINAL_CTA_SLOTS, options, rows)
            planner.plan(None, -1, requests, seconds)
            module = self._modules[key] = key.load()
        slots = self._graph_slots.get(key) or slots_of_stream(module, self.workspaces.floats)
        planner = self._configured(problem, key, slots, options, rows)
        mask = problem.tensors.mask
        visible = mask.visible if isinstance(mask, CustomMask) else None
        planner.plan(self.workspaces.ints, self._float_bytes, requests, seconds, visible)
        self._bind(module, problem, second)
        if not options.non_blocking:
            torch.cuda.current_stream(self.device).synchronize()
        self.problem, self._key, self._run = problem, key, module.run
        if options.capacity is not None:
            fixed = options.fixed_split_size is not None
            self._graph_choice = problem.spec.kernel_options, fixed, key.choice
            self._graph_slots[key] = slots

    def check(self, problem: AttentionProblem, second: AttentionProblem | None = None) -> None:
        """Refuse requests that no plan can be made for, and leave the latest plan alone."""
        key = self._module_key(problem, second, NO_OPTIONS)
        key.config()
        planner, self._planner = self._planner, self._checker
        try:
            self._checker = self._configured(problem, key, _NOMINAL_CTA_SLOTS, NO_OPTIONS, ALL_ROWS)
            self._checker.plan(None, -1, problem.requests, second and second.requests)
        except NO_MODULE:
            if not is_computed_from_plans():
                raise
        finally:
            self._planner = planner
        if self.device.type != "cuda":
            self._check_is_computed()

    def workspace_size(
        self,
        problem: AttentionProblem,
        options: PlanOptions = NO_OPTIONS,
        *,
        choice: KernelChoice | None = None,
        rows: RowRange = ALL_ROWS,
    ) -> tuple[int, int]:
        """Bytes of the float and the int workspace that `plan` with these arguments needs."""
        if not problem.requests.page_size and is_worth_gathering(problem, self.device, options):
            problem = Gathering(problem, self.device).problem  # rows of pages are no need
        key = self._module_key(problem, None, options, choice)
        cuda = self.device.type == "cuda"
        slots = slots_of_stream(key.load(), self.workspaces.floats) if cuda else _NOMINAL_CTA_SLOTS
        planner, self._planner = self._planner, None  # the plan in use stays as it is
        try:
            sizer = self._configured(problem, key, slots, options, rows)
            return sizer.bytes_needed(problem.requests)
        finally:
            self._planner = planner

    def change_options(self, problem: AttentionProblem, keep_plan: bool = False) -> None:
        """Launch the planned requests with other options from now on.

        `problem` differs from the planned one in its spec, and what follows from that, only. If
        other keys are visible the requests are planned anew, except with `keep_plan`, for a CUDA
        graph that was captured, and while one is: then the plan must cover the keys that are
        visible now, and visits the others for nothing.

        Raises
        ------
        ValueError
            If it does not cover them.
        """
        planned = self.problem
        assert planned is not None and self._key is not None
        if self.device.type != "cuda":
            self.problem = problem
            return
        keep_plan = keep_plan or torch.cuda.is_current_stream_capturing()
        now, before = problem.requests, planned.requests
        if (now.causal, now.window_left) != (before.causal, before.window_left):
            if not keep_plan:
                self.plan(problem, self._options._replace(non_blocking=True))
                return
            if not now.sees_no_more_than(before):
                raise ValueError(
                    "`causal` and `window_left` of forward() must not show more keys than those "
                    "of plan() with a CUDA graph, which reads the plan"
                )
        key = self._module_key(problem, None, self._options)
        if self._gathering is not None or key.choice.backend != self._key.choice.backend:
            if keep_plan:
                raise ValueError(
                    "options of forward() must not need another kernel than those of plan() with "
                    "a CUDA graph, which reads the plan"
                )
            self.plan(problem, self._options._replace(non_blocking=True))
            return
        key = key._replace(choice=self._key.choice, device_lengths=self._key.device_lengths)
        module = self._module(key)
        self._bind(module, problem, None)
        self.problem, self._key, self._run = problem, key, module.run

    # --- Running ------------------------------------------------------------------------------

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        sm_scale: float,
        v_scale: float,
        window_left: int,
        sinks: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        additional: Sequence[Any] = (),
        head_scales: Sequence[HeadScales] = (),
        block_scales: BlockScales | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Launch what was planned.

        Parameters
        ----------
        q, k, v, out, lse : torch.Tensor
            As the wrappers take them; `v` None means that `k` is a cache of both; `lse` None that
            it is not wanted.
        sm_scale, v_scale : float
            Factors of the logits, with all scales folded in, and of the output.
        window_left : int
            The plan's, or narrower.
        sinks : torch.Tensor, optional
            ``[num_qo_heads]`` float32.
        enable_pdl : bool, optional
            None: where the device has it.
        additional : sequence
            Tensors, then scalars, of a user's variant.
        head_scales : sequence of HeadScales
            Factors besides, of each problem; empty: none.
        block_scales : tuple, optional
            Scales of 4-bit keys and of values.
        output_scale : torch.Tensor, optional
            Where the scales of an 8-bit `out` go.
        """
        run, key = self._run, self._key
        if self._gathering is not None:
            q, k, v = self._gathering.apply(q, k, v)
        if block_scales is not None:
            self._planned_module().block_scales(self._launch, *block_scales, out, lse)
        if output_scale is not None:
            self._planned_module().output_scale(self._launch, output_scale, q, out, lse)
        if (
            sinks is not None
            or head_scales
            or (window_left >= 0 and key is not None and not key.sliding_window)
        ):
            module = self._module_with(sinks is not None, window_left >= 0, bool(head_scales))
            for kind, scales in enumerate(head_scales):
                module.head_scales(self._launch, kind, *scales)
            run = module.run
        if self._follows_a_kernel:
            enable_pdl = False  # launches read the work list before they wait
        arguments = (q, k, v, out, lse, sm_scale, v_scale, window_left, sinks, enable_pdl)
        run(self._launch, *arguments, *additional)

    def set_mask(self, mask: CustomMask) -> None:
        """Another custom mask of the same lengths from the next `run` on."""
        self._planned_module().mask(self._launch, mask.bits, mask.indptr)

    def set_second(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        sm_scale: float,
        v_scale: float,
        window_left: int,
    ) -> None:
        """Tensors and numbers of the `second` problem for the next `run`, as that takes them."""
        module = self._planned_module()
        module.second(self._launch, q, k, v, out, lse, sm_scale, v_scale, window_left)

    # --- Details ------------------------------------------------------------------------------

    def _gathering_for(self, problem: AttentionProblem, options: PlanOptions) -> Gathering | None:
        """Copies that are worth their time, if the float workspace has room for their rows."""
        if is_computed_from_plans() or not is_worth_gathering(problem, self.device, options):
            return None
        gathering = Gathering(problem, self.device)
        partial_bytes, _ = self.workspace_size(gathering.problem, options)
        return gathering if gathering.fits(partial_bytes, self._float_bytes) else None

    def _module_key(
        self,
        problem: AttentionProblem,
        second: AttentionProblem | None,
        options: PlanOptions,
        choice: KernelChoice | None = None,
    ) -> ModuleKey:
        spec, mask = problem.spec, problem.tensors.mask
        fixed, known = options.fixed_split_size is not None, self._graph_choice
        if (
            options.capacity is not None
            and known is not None
            and known[:2] == (spec.kernel_options, fixed)
        ):
            choice = known[2]  # a captured launch keeps its kernel
        elif choice is None:
            choice = choose_kernel(problem, self.device, second=second, fixed_split_size=fixed)
        mask_mode = spec.mask_mode if mask is None else mask.mode
        paged, window = problem.requests.page_size > 0, spec.window_left >= 0
        shape = SecondShape.of(second or problem) if choice.tile_q_second else NO_SECOND
        return ModuleKey(spec.kernel_options, choice, paged, mask_mode, window, shape, spec.sinks)

    def _configured(
        self,
        problem: AttentionProblem,
        key: ModuleKey,
        slots: CtaSlots,
        options: PlanOptions,
        rows: RowRange,
    ) -> AttentionPlanner:
        """The planner, told what does not depend on the batch."""
        planner = self._planner
        if planner is None:
            planner = self._planner = AttentionPlanner()
        spec, choice = problem.spec, key.choice
        even = 0 if problem.requests.qo_indptr is not None else problem.requests.tokens_per_request
        source = (spec, choice, slots, options, rows, even)
        if source != planner.config_source:
            tiles, capacity = kv_tiles(choice.backend, spec.kernel_options), options.capacity
            planner.configure(
                PlanConfig(
                    num_kv_heads=spec.num_kv_heads,
                    group_size=spec.group_size,
                    head_dim_vo=spec.head_dim_vo,
                    tile_q=choice.tile_q,
                    tile_q_second=choice.tile_q_second,
                    tile_kv=tiles.tile_kv,
                    piece_tiles=tiles.piece_tiles,
                    cta_slots=slots.num_ctas,
                    lone_speed=slots.lone_speed,
                    fixed_split_size=options.fixed_split_size or 0,
                    disable_split_kv=options.disable_split_kv,
                    graph_batch_size=-1 if capacity is None else capacity.batch_size,
                    graph_qo_tokens=0 if capacity is None else capacity.qo_tokens,
                    graph_qo_len=0 if capacity is None else even,
                    least_rows=rows.least,
                    most_rows=rows.most,
                )
            )
            planner.config_source = source
        return planner

    def _plan_without_gpu(
        self,
        problem: AttentionProblem,
        second: AttentionProblem | None,
        key: ModuleKey,
        rows: RowRange,
    ) -> None:
        """Everything but the launch, for what computes from the plan."""
        key.config()
        try:
            planner = self._configured(problem, key, _NOMINAL_CTA_SLOTS, self._options, rows)
            seconds = None if second is None else second.requests
            planner.plan(self.workspaces.ints, self._float_bytes, problem.requests, seconds)
        except NO_MODULE:
            if not is_computed_from_plans():
                raise
        self._check_is_computed()
        self.problem, self._key = problem, key

    def _check_is_computed(self) -> None:
        if not is_computed_from_plans():
            raise ValueError(
                f"`float_workspace_buffer` must be a CUDA tensor, got one on {self.device}"
            )

    def _bind(
        self, module: AttentionModule, problem: AttentionProblem, second: AttentionProblem | None
    ) -> None:
        """Put everything that a plan fixes into the bytes of the launch."""
        assert self._planner is not None
        if self._launch.numel() < module.launch_bytes:
            self._launch = torch.zeros(module.launch_bytes, dtype=torch.uint8)
        layout, has_capacity = self._planner.layout, self._options.capacity is not None
        bind(module, self._launch, layout, self.workspaces, problem, second, has_capacity)
        if self._lengths is not None:
            module.lengths(self._launch, *self._planner.divided(problem.requests, self._lengths))

    def _planned_module(self) -> AttentionModule:
        if self._run is _plan_first:
            _plan_first()
        assert self._key is not None
        return self._modules[self._key]

    def _module(self, key: ModuleKey) -> AttentionModule:
        if (module := self._modules.get(key)) is None:
            module = self._modules[key] = key.load()
        return module

    def _module_with(self, sinks: bool, window: bool, head_scales: bool) -> AttentionModule:
        """The planned module with options that a run adds; it reads the same launch."""
        assert self._planned_module() and self._key is not None
        return self._module(self._key.with_options(sinks, window, head_scales))


def _plan_first(*_: Any) -> None:
    raise ValueError("plan() must be called before run(), and again after new workspaces")
