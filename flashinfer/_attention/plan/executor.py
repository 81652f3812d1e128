"""Plans and launches attention: the state behind every wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...jit.attention.config import AttentionConfig
from ...jit.attention.hopper import hopper_tile_kv, is_widened
from ...jit.attention.modules import AttentionModule, get_attention_module
from ...jit.attention.plan import ANY_ROWS, AttentionPlan, Group
from ...jit.errors import ToolchainError
from ...reference_backend import is_active
from .choice import choose_kernel
from .problem import AttentionProblem
from .tiles import PORTABLE_TILE_KV

INT_WORKSPACE_BYTES = 8 << 20
"""Work lists of some 100,000 tiles."""

ALL_ROWS = (0, ANY_ROWS)
"""As the least and the most rows of the requests of a launch: it computes all."""

_STATE_BYTES = (
    4096  # of AttentionLaunch in csrc/attention_binding.h, whose size depends on variants
)
_NOMINAL_CTA_SLOTS = (264, 1)  # AttentionModule.cta_slots for plans without a GPU
_TILE_Q, _BACKEND = 5, 15  # positions in the key of a module
# KV tiles that an item costs beside its own (docs/performance.md); attention_choice.h has the same.
_PIECE_TILES = {"fa2": 1, "fa3": 2}

Pair = tuple[AttentionProblem, AttentionProblem]
HeadScales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Factors of each head, of queries, keys and values: float32, a value per head or one."""


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
    config : AttentionConfig
        Of the module that the latest plan chose.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor | None = None,
    ) -> None:
        self.problem: AttentionProblem | None = None
        self._planner: AttentionPlan | None = None
        self._checker: AttentionPlan | None = None
        self._state = torch.zeros(_STATE_BYTES, dtype=torch.uint8)
        self._modules: dict[tuple[Any, ...], AttentionModule] = {}
        self._key: tuple[Any, ...] = ()
        self._has_window = False
        self._run: Any = _plan_first
        self._graph_choice: tuple[tuple[Any, ...], int, str] | None = None
        self._settings: tuple[int | None, bool, tuple[int, int] | None] = (None, False, None)
        self.set_workspaces(float_workspace_buffer, int_workspace_buffer)

    @property
    def config(self) -> AttentionConfig:
        return _config(self._key)

    def set_workspaces(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None
    ) -> None:
        """Use these from the next plan on; an int workspace is allocated if none is given."""
        _check_workspace("float_workspace_buffer", float_workspace_buffer)
        self.device = float_workspace_buffer.device
        if int_workspace_buffer is None:
            int_workspace_buffer = torch.empty(
                INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
            )
        _check_workspace("int_workspace_buffer", int_workspace_buffer)
        if int_workspace_buffer.device != self.device:
            raise ValueError(
                f"`int_workspace_buffer` must be on {self.device} as `float_workspace_buffer` is, "
                f"got {int_workspace_buffer.device}"
            )
        self.float_workspace = float_workspace_buffer
        self.int_workspace = int_workspace_buffer
        self._float_bytes = float_workspace_buffer.numel() * float_workspace_buffer.element_size()
        self._run = _plan_first

    def move_workspaces(self, floats: torch.Tensor, ints: torch.Tensor) -> None:
        """Let the latest plan use others: `floats` as large as before, `ints` with its list."""
        assert self.problem is not None and self._planner is not None
        self.float_workspace, self.int_workspace = floats, ints
        is_graph = self._settings[2] is not None
        self._bind(self._modules[self._key], self.problem, None, self._planner.info, is_graph)

    def plan(
        self,
        problem: AttentionProblem,
        *,
        second: AttentionProblem | None = None,
        tile_q_second: int = 0,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        graph_capacity: tuple[int, int] | None = None,
        non_blocking: bool = True,
        kernel: tuple[str, int] | None = None,
        rows: tuple[int, int] = ALL_ROWS,
    ) -> None:
        """Choose a module, plan, and start the copy of the work list to the GPU.

        Parameters
        ----------
        problem : AttentionProblem
            The requests.
        second : AttentionProblem, optional
            More requests in the same launch that have tensors of their own, always paged, tiled by
            `tile_q_second`; heads, dtypes, page size and options are those of `problem`. At most
            one of the two has a custom mask.
        tile_q_second : int
            Tile of a second shape in the launch of the portable kernel; without `second`, for the
            requests of `problem` that fit it. 0: one shape.
        fixed_split_size : int, optional
            Cut keys at multiples of this many tokens and nowhere else.
        disable_split_kv : bool
            Cut nothing.
        graph_capacity : tuple of int, optional
            Requests and query tokens that later plans of a CUDA graph may have.
        non_blocking : bool
            Whether to return before the copy has ended.
        kernel : tuple, optional
            Backend and query tile, where the caller has chosen; see `choose_kernel`.
        rows : tuple of int
            The least and the most packed query rows of the requests that are computed; another
            launch computes the others.

        Raises
        ------
        ValueError
            If the plan is impossible, a workspace is too small (which says the bytes that are
            needed) or not on a GPU.
        """
        check_heads(problem)
        key = self._module_key(
            problem, second, tile_q_second, fixed_split_size, graph_capacity, kernel
        )
        groups = (problem.group(), () if second is None else second.group())
        settings = (fixed_split_size, disable_split_kv, graph_capacity)
        self._settings = settings
        self.problem = None
        self._run = _plan_first
        if self.device.type != "cuda":
            self._plan_without_gpu(problem, key, settings, groups, rows)
            return
        module = self._modules.get(key)
        if module is None:
            config = _config(key)
            # What is wrong with the request is said before anything is compiled.
            self._configure(problem, key, _NOMINAL_CTA_SLOTS, settings, rows)
            assert self._planner is not None
            self._planner.plan(None, -1, *groups)
            module = self._modules[key] = get_attention_module(config, problem.variant)
        self._configure(problem, key, module.cta_slots(self.float_workspace), settings, rows)
        assert self._planner is not None
        info = self._planner.plan(self.int_workspace, self._float_bytes, *groups)
        self._bind(module, problem, second, info, graph_capacity is not None)
        if not non_blocking:
            torch.cuda.current_stream(self.device).synchronize()
        self.problem = problem
        self._key = key
        self._has_window = problem.window_left >= 0
        self._run = module.run
        if graph_capacity is not None:
            fixed = fixed_split_size is not None
            self._graph_choice = _choice_of(problem, fixed), key[_TILE_Q], key[_BACKEND]

    def change_options(self, problem: AttentionProblem, keep_plan: bool = False) -> None:
        """Launch the planned requests with other options from now on.

        `problem` differs from the planned one in options only. If other keys are visible the
        requests are planned anew, except with `keep_plan`, for a CUDA graph that was captured, and
        while one is: then the plan must cover the keys that are visible now, and visits the others
        for nothing.

        Raises
        ------
        ValueError
            If it does not cover them.
        """
        planned, settings = self.problem, self._settings
        assert planned is not None
        if self.device.type != "cuda":
            self.problem = problem
            return
        keep_plan = keep_plan or torch.cuda.is_current_stream_capturing()
        if problem.group() != planned.group():
            if not keep_plan:
                self._plan_again(problem)
                return
            if not covers(planned, problem):
                raise ValueError(
                    "`causal` and `window_left` of forward() must not show more keys than those "
                    "of plan() with a CUDA graph, which reads the plan"
                )
        key = self._module_key(problem, None, 0, settings[0], settings[2])
        if key[_BACKEND] != self._key[_BACKEND]:
            if keep_plan:
                raise ValueError(
                    "`pos_encoding_mode` of forward() must not need another kernel than that of "
                    "plan() with a CUDA graph, which reads the plan"
                )
            self._plan_again(problem)
            return
        key = (*key[:_TILE_Q], self._key[_TILE_Q], *key[_TILE_Q + 1 :])
        module = self._modules.get(key)
        if module is None:
            module = self._modules[key] = get_attention_module(_config(key), problem.variant)
        assert self._planner is not None
        self._bind(module, problem, None, self._planner.info, settings[2] is not None)
        self._key, self._run, self._has_window = key, module.run, problem.window_left >= 0
        self.problem = problem

    def _plan_again(self, problem: AttentionProblem) -> None:
        """`plan` with the settings of the latest one."""
        fixed_split_size, disable_split_kv, capacity = self._settings
        self.plan(
            problem,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            graph_capacity=capacity,
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sm_scale: float,
        v_scale: float,
        window_left: int,
        sinks: torch.Tensor | None,
        enable_pdl: bool | None,
        additional: Sequence[Any] = (),
        head_scales: HeadScales | None = None,
    ) -> None:
        """Launch what was planned.

        Parameters
        ----------
        q, k, v, out, lse : torch.Tensor
            As the wrappers take them; `v` None means that `k` is a cache of both; `lse` None that
            it is not wanted.
        sm_scale, v_scale : float
            Of the logits, all scales folded in, and of the output.
        window_left : int
            The plan's, or narrower.
        sinks : torch.Tensor, optional
            ``[num_qo_heads]`` float32.
        enable_pdl : bool, optional
            None: where the device has it.
        additional : sequence
            Tensors, then scalars, of a user's variant.
        head_scales : tuple, optional
            Factors of each head besides, of queries, keys and values.
        """
        run = self._run
        if head_scales is not None:
            module = self._module_with(sinks is not None, window_left >= 0, True)
            module.head_scales(self._state, *head_scales)
            run = module.run
        elif sinks is not None or (window_left >= 0 and not self._has_window):
            run = self._module_with(sinks is not None, window_left >= 0).run
        run(
            *(self._state, q, k, v, out, lse, sm_scale, v_scale),
            *(window_left, sinks, enable_pdl, *additional),
        )

    def set_mask(self, custom_mask: torch.Tensor, mask_indptr: torch.Tensor) -> None:
        """Another custom mask of the same lengths from the next `run` on."""
        self._modules[self._key].mask(self._state, custom_mask, mask_indptr)

    def set_second(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        v_scale: float = 1.0,
    ) -> None:
        """Tensors of the `second` problem for the next `run`."""
        if self._run is _plan_first:
            _plan_first()
        self._modules[self._key].second(self._state, q, k, v, out, lse, v_scale)

    def check(self, problem: AttentionProblem, second: AttentionProblem | None = None) -> None:
        """Refuse requests that no plan can be made for, and leave the latest plan alone."""
        check_heads(problem)
        key = self._module_key(problem, second, 0 if second is None else 16, None, None)
        _config(key)
        planner, self._planner = self._planner, self._checker
        try:
            self._configure(problem, key, _NOMINAL_CTA_SLOTS, (None, False, None))
            self._checker = self._planner
            assert self._checker is not None
            self._checker.plan(None, -1, problem.group(), () if second is None else second.group())
        except ToolchainError:
            if not is_active():
                raise
        finally:
            self._planner = planner
        if self.device.type != "cuda" and not is_active():
            raise ValueError(
                f"`float_workspace_buffer` must be a CUDA tensor, got one on {self.device}"
            )

    def workspace_size(
        self,
        problem: AttentionProblem,
        *,
        second: AttentionProblem | None = None,
        tile_q_second: int = 0,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        graph_capacity: tuple[int, int] | None = None,
        kernel: tuple[str, int] | None = None,
        rows: tuple[int, int] = ALL_ROWS,
    ) -> tuple[int, int]:
        """Bytes of the float and the int workspace that `plan` with these arguments needs."""
        check_heads(problem)
        key = self._module_key(
            problem, second, tile_q_second, fixed_split_size, graph_capacity, kernel
        )
        slots = _NOMINAL_CTA_SLOTS
        if self.device.type == "cuda":
            module = get_attention_module(_config(key), problem.variant)
            slots = module.cta_slots(self.float_workspace)
        settings = (fixed_split_size, disable_split_kv, graph_capacity)
        planner, self._planner = self._planner, None  # the plan in use stays as it is
        try:
            self._configure(problem, key, slots, settings, rows)
            assert self._planner is not None
            seconds = () if second is None else second.group()
            return self._planner.bytes_needed(problem.group(), seconds)
        finally:
            self._planner = planner

    # --- Details ------------------------------------------------------------------------------

    def _module_key(
        self,
        problem: AttentionProblem,
        second: AttentionProblem | None,
        tile_q_second: int,
        fixed_split_size: int | None,
        graph_capacity: tuple[int, int] | None,
        kernel: tuple[str, int] | None = None,
    ) -> tuple[Any, ...]:
        """The fields of AttentionConfig, as a tuple: building the dataclass takes longer."""
        fixed = fixed_split_size is not None
        known = None if graph_capacity is None else self._graph_choice
        if known is not None and known[0] == _choice_of(problem, fixed):
            _, tile_q, backend = known  # a captured launch keeps its kernel
        else:
            backend, tile_q = kernel or choose_kernel(
                problem, self.device, two_parts=second is not None, fixed_split_size=fixed
            )
        mask_second = second.mask_mode if second is not None else problem.mask_mode
        return (
            problem.q_data_type,
            problem.kv_data_type,
            problem.o_data_type,
            problem.head_dim_qk,
            problem.head_dim_vo,
            tile_q,
            problem.page_size > 0,
            problem.mask_mode,
            problem.pos_encoding_mode.lower(),
            problem.window_left >= 0,
            problem.logits_soft_cap > 0.0,
            False,
            tile_q_second,
            mask_second if tile_q_second else "none",
            problem.variant is not None,
            backend,
            False,
            problem.variant,
        )

    def _configure(
        self,
        problem: AttentionProblem,
        key: tuple[Any, ...],
        cta_slots: tuple[int, int],
        settings: tuple[int | None, bool, tuple[int, int] | None],
        rows: tuple[int, int] = ALL_ROWS,
    ) -> None:
        fixed_split_size, disable_split_kv, capacity = settings
        if self._planner is None:
            self._planner = AttentionPlan()
        self._planner.configure(
            problem.num_kv_heads,
            problem.num_qo_heads // problem.num_kv_heads,
            problem.head_dim_vo,
            key[_TILE_Q],
            cta_slots[0],
            key[12],
            _tile_kv(key),
            fixed_split_size or 0,
            disable_split_kv,
            *((-1, 0) if capacity is None else capacity),
            problem.tokens_per_request if capacity and problem.qo_indptr is None else 0,
            cta_slots[1],
            _PIECE_TILES[key[_BACKEND]],
            *rows,
        )

    def _plan_without_gpu(
        self,
        problem: AttentionProblem,
        key: tuple[Any, ...],
        settings: tuple[int | None, bool, tuple[int, int] | None],
        groups: tuple[Group, Group | tuple[()]],
        rows: tuple[int, int],
    ) -> None:
        """Everything but the launch: the reference backend computes from `problem`."""
        _config(key)
        try:
            self._configure(problem, key, _NOMINAL_CTA_SLOTS, settings, rows)
            assert self._planner is not None
            self._planner.plan(self.int_workspace, self._float_bytes, *groups)
        except ToolchainError:
            if not is_active():
                raise
        if not is_active():
            raise ValueError(
                f"`float_workspace_buffer` must be a CUDA tensor, got one on {self.device}"
            )
        self.problem, self._key = problem, key

    def _bind(
        self,
        module: AttentionModule,
        problem: AttentionProblem,
        second: AttentionProblem | None,
        info: torch.Tensor,
        is_graph: bool,
    ) -> None:
        state = self._state
        module.bind(
            *(state, info, self.int_workspace, self.float_workspace, problem.kv_indices),
            *(problem.num_qo_heads, problem.num_kv_heads, problem.page_size),
            *(problem.kv_layout == "HND", is_graph),
        )
        if second is not None:
            rows = int(problem.kv_lengths()[0]) if problem.rows_as_pages else -1
            module.bind_second(state, info, second.kv_indices, second.is_hnd, rows)
        if problem.logits_soft_cap > 0.0 or problem.pos_encoding_mode != "NONE":
            module.options(
                *(state, problem.logits_soft_cap, problem.rope_scale, problem.rope_theta),
                problem.alibi_slopes,
            )
        masked = problem if second is None or problem.custom_mask is not None else second
        if masked.custom_mask is not None:
            module.mask(state, masked.custom_mask, masked.mask_indptr)
        elif problem.prefix_len_ptr is not None:
            module.items(
                *(state, problem.prefix_len_ptr, problem.token_pos_in_items_ptr),
                *(problem.token_pos_in_items_len, problem.max_item_len_ptr),
            )

    def _module_with(self, sinks: bool, window: bool, head_scales: bool = False) -> AttentionModule:
        """The planned module with options that a run adds; it reads the same state."""
        if self.problem is None:
            _plan_first()
        planned = self._key
        key = (
            *(*planned[:9], planned[9] or window, planned[10], sinks),
            *(*planned[12:-2], head_scales, planned[-1]),
        )
        module = self._modules.get(key)
        if module is None:
            assert self.problem is not None
            module = get_attention_module(_config(key), self.problem.variant)
            self._modules[key] = module
        return module


def covers(planned: AttentionProblem, problem: AttentionProblem) -> bool:
    """Whether a plan for `planned` visits every key that `problem` shows a query."""
    mine, its = planned.group(), problem.group()
    return (not mine[6] or its[6]) and (mine[7] < 0 or 0 <= its[7] <= mine[7])


def _choice_of(problem: AttentionProblem, fixed_split_size: bool) -> tuple[Any, ...]:
    """What the choice of a graph's kernel holds for, all of which a capture freezes."""
    return (
        *(problem.q_data_type, problem.kv_data_type, problem.head_dim_qk, problem.head_dim_vo),
        *(problem.pos_encoding_mode, problem.variant, fixed_split_size),
    )


def _plan_first(*_: Any) -> None:
    raise ValueError("plan() must be called before run(), and again after new workspaces")


def _tile_kv(key: tuple[Any, ...]) -> int:
    if key[_BACKEND] != "fa3":
        return PORTABLE_TILE_KV
    return hopper_tile_kv(key[3], key[4], is_widened(key[0], key[1]))


def _config(key: tuple[Any, ...]) -> AttentionConfig:
    return AttentionConfig(*key[:-1])


def check_heads(problem: AttentionProblem) -> None:
    """Refuse numbers of heads that do not make groups of up to 64."""
    q_heads, kv_heads = problem.num_qo_heads, problem.num_kv_heads
    if kv_heads < 1 or q_heads < 1 or q_heads % kv_heads or q_heads // kv_heads > 64:
        raise ValueError(
            "`num_qo_heads` must be 1 to 64 times `num_kv_heads`, got "
            f"num_qo_heads={q_heads}, num_kv_heads={kv_heads}"
        )


def _check_workspace(name: str, buffer: Any) -> None:
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor, got {type(buffer).__name__}")
    if not buffer.is_contiguous() or buffer.data_ptr() % 16:
        raise ValueError(f"`{name}` must be contiguous and begin at a multiple of 16 bytes")
