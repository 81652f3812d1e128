"""What the attention wrappers have in common: workspaces, options, and the launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..._common.cache_layout import is_hnd
from ..checks import (
    check_backend,
    check_count,
    check_flag,
    check_pos_encoding,
    check_window,
    logits_scale,
    positive,
    resolve_dtype,
    resolve_dtypes,
    scales_by_position,
    soft_cap,
    split_scales,
    split_size,
    variant_from_jit_args,
)
from ..plan.alibi import get_alibi_slopes
from ..plan.choice import BACKENDS, is_backend_supported, prepare_jit_additional_args
from ..plan.executor import AttentionExecutor, HeadScales, covers
from ..plan.problem import AttentionProblem


def planned(name: str) -> property:
    """An option of the latest plan, None before the first: engines assert these."""
    return property(lambda self: self._problem and getattr(self._problem, name))


class AttentionWrapper:
    """Base of the wrappers. Not thread-safe; different wrappers share nothing."""

    is_backend_supported = staticmethod(is_backend_supported)
    _backends: tuple[str, ...] = BACKENDS
    _executor_type: type[AttentionExecutor] = AttentionExecutor
    _window_left = planned("window_left")
    _logits_soft_cap = planned("logits_soft_cap")
    _sm_scale = planned("sm_scale")

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: Sequence[Any] | None,
        jit_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        is_hnd(kv_layout)
        check_backend(backend, self._backends)
        self._backend = backend
        self._kv_layout = kv_layout
        self._use_cuda_graph = check_flag("use_cuda_graph", use_cuda_graph)
        self._variant = variant_from_jit_args(jit_args, jit_kwargs)
        self._jit_args = jit_args
        self._jit_kwargs = dict(jit_kwargs or {})
        self._executor = self._executor_type(float_workspace_buffer)
        self.device = self._executor.device
        self._problem: AttentionProblem | None = None
        self._plan_problem: AttentionProblem | None = None  # as plan() said, before forward()
        self._overrides: dict[str, Any] | None = None
        self._split: tuple[int | None, bool] = (None, False)
        self._captured: dict[str, Any] | None = None
        self._known_options: dict[tuple[Any, ...], dict[str, Any]] = {}

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for CUDA graphs."""
        return self._use_cuda_graph

    @property
    def _float_workspace_buffer(self) -> torch.Tensor:
        return self._executor.float_workspace

    @property
    def _int_workspace_buffer(self) -> torch.Tensor:
        return self._executor.int_workspace

    @_int_workspace_buffer.setter
    def _int_workspace_buffer(self, buffer: torch.Tensor) -> None:
        """Engines share one among wrappers that are planned anew before each run."""
        self.reset_workspace_buffer(self._executor.float_workspace, buffer)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Use other workspaces, from the next ``plan`` on.

        Parameters
        ----------
        float_workspace_buffer : torch.Tensor
            For partial results of split requests; contiguous, any dtype.
        int_workspace_buffer : torch.Tensor
            For the work list; contiguous, any dtype, on the same device.

        Raises
        ------
        TypeError, ValueError
            If a buffer is not a contiguous tensor, or they are on different devices.
        """
        self._executor.set_workspaces(float_workspace_buffer, int_workspace_buffer)
        self.device = self._executor.device
        self._problem = None
        self._known_options = {}

    # --- Planning -----------------------------------------------------------------------------

    def _options(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
        dtypes: tuple[Any, Any, Any],
    ) -> dict[str, Any]:
        """Fields of AttentionProblem that do not depend on the batch, checked.

        What was checked is remembered: plans of one wrapper differ in their batches only.
        """
        scales = (logits_soft_cap, sm_scale, rope_scale, rope_theta)
        heads = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        key = (heads, pos_encoding_mode, window_left, scales, dtypes)
        try:
            known = self._known_options.get(key)
        except TypeError:  # an argument of a type that is refused below
            known = None
        if known is not None:
            return known
        options = self._checked_options(*heads, pos_encoding_mode, window_left, *scales, dtypes)
        if not any(isinstance(scale, torch.Tensor) for scale in scales):
            self._known_options = {key: options}
        return options

    def _checked_options(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
        dtypes: tuple[Any, Any, Any],
    ) -> dict[str, Any]:
        num_qo_heads = check_count("num_qo_heads", num_qo_heads)
        num_kv_heads = check_count("num_kv_heads", num_kv_heads)
        head_dim_qk = check_count("head_dim_qk", head_dim_qk)
        head_dim_vo = check_count("head_dim_vo", head_dim_vo)
        if self._variant is None:
            q_dtype, kv_dtype, o_dtype = resolve_dtypes(*dtypes)
        else:
            pos_encoding_mode = self._check_jit(
                head_dim_qk, head_dim_vo, pos_encoding_mode, logits_soft_cap, dtypes
            )
            assert self._jit_args is not None
            q_dtype, kv_dtype, o_dtype = resolve_dtypes(*self._jit_args[1:4])
        options: dict[str, Any] = dict(
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            q_data_type=q_dtype,
            kv_data_type=kv_dtype,
            o_data_type=o_dtype,
            sm_scale=logits_scale(sm_scale, head_dim_qk),
            window_left=check_window(window_left),
            logits_soft_cap=soft_cap(logits_soft_cap),
            pos_encoding_mode=check_pos_encoding(pos_encoding_mode),
            rope_scale=positive("rope_scale", rope_scale, 1.0),
            rope_theta=positive("rope_theta", rope_theta, 1e4),
            kv_layout=self._kv_layout,
            variant=self._variant,
            backend=self._backend,
        )
        if pos_encoding_mode == "ALIBI":
            options["alibi_slopes"] = self._alibi_slopes(num_qo_heads)
        return options

    def _check_jit(
        self,
        head_dim_qk: int,
        head_dim_vo: int,
        pos_encoding_mode: str,
        logits_soft_cap: float | None,
        dtypes: tuple[Any, Any, Any],
    ) -> str:
        """Refuse a plan that contradicts `jit_args`; returns the positional encoding."""
        assert self._jit_args is not None
        if self._jit_args[4] != torch.int32:
            raise ValueError(f"`jit_args`: idtype must be torch.int32, got {self._jit_args[4]}")
        for name, planned, given in (
            ("head_dim_qk", head_dim_qk, self._jit_args[5]),
            ("head_dim_vo", head_dim_vo, self._jit_args[6]),
        ):
            if planned != given:
                raise ValueError(f"`{name}` must be {given} as in `jit_args`, got {planned}")
        names = ("q_data_type", "kv_data_type", "o_data_type")
        for name, planned, given in zip(names, dtypes, self._jit_args[1:4], strict=True):
            # "float16" is what a plan says that says nothing.
            if planned not in (None, "float16") and resolve_dtype(name, planned) != given:
                raise ValueError(f"`{name}` must be {given} as in `jit_args`, got {planned}")
        if soft_cap(logits_soft_cap) > 0.0:
            raise ValueError(
                "`logits_soft_cap` must be left out with `jit_args`: the variant's "
                f"LogitsTransform takes its place, got {logits_soft_cap}"
            )
        mode = self._jit_kwargs.get("pos_encoding_mode", 0)
        if mode not in (0, 1) or pos_encoding_mode == "ALIBI":
            raise ValueError(
                "`pos_encoding_mode` must be NONE or ROPE_LLAMA with `jit_args`, got "
                f"{pos_encoding_mode!r} and {mode!r} in `jit_kwargs`"
            )
        return "ROPE_LLAMA" if mode == 1 else pos_encoding_mode

    def _alibi_slopes(self, num_qo_heads: int) -> torch.Tensor:
        known = getattr(self, "_slopes", None)
        if known is None or known.shape[0] != num_qo_heads or known.device != self.device:
            known = get_alibi_slopes(num_qo_heads, self.device)
            self._slopes = known
        return known

    def _plan(
        self,
        problem: AttentionProblem,
        fixed_split_size: int | None,
        disable_split_kv: bool,
        non_blocking: bool,
        graph_capacity: tuple[int, int] | None,
    ) -> None:
        disable_split_kv = check_flag("disable_split_kv", disable_split_kv)
        non_blocking = check_flag("non_blocking", non_blocking)
        fixed_split_size = split_size(fixed_split_size)
        self._split = (fixed_split_size, disable_split_kv)
        self._problem = self._overrides = None
        if self._captured is not None:
            self._check_captured(problem)
        self._executor.plan(
            problem,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            graph_capacity=graph_capacity,
            non_blocking=non_blocking,
        )
        self._problem = self._plan_problem = problem

    def end_forward(self) -> None:
        """Deprecated: nothing ends with a step; here for callers that pair it."""

    def _override(self, **options: Any) -> None:
        """Options of the deprecated ``forward`` take the place of the plan's."""
        problem = self._problem
        if problem is None:
            raise ValueError("plan() must be called before forward(), and after new workspaces")
        if options == self._overrides:
            return
        changed: dict[str, Any] = {
            "pos_encoding_mode": check_pos_encoding(options["pos_encoding_mode"]),
            "window_left": check_window(options["window_left"]),
            "logits_soft_cap": soft_cap(options["logits_soft_cap"]),
            "sm_scale": logits_scale(options["sm_scale"], problem.head_dim_qk),
            "rope_scale": positive("rope_scale", options["rope_scale"], 1.0),
            "rope_theta": positive("rope_theta", options["rope_theta"], 1e4),
        }
        if "causal" in options:
            changed["causal"] = check_flag("causal", options["causal"])
        if any(getattr(problem, name) != value for name, value in changed.items()):
            if changed["pos_encoding_mode"] == "ALIBI":
                changed["alibi_slopes"] = self._alibi_slopes(problem.num_qo_heads)
            problem = dataclasses.replace(problem, **changed)
            self._executor.change_options(problem, keep_plan=self._captured is not None)
            self._problem = problem
        self._overrides = options

    # --- Running ------------------------------------------------------------------------------

    def _launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        args: tuple[Any, ...],
        q_scale: Any,
        k_scale: Any,
        v_scale: Any,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        window_left: int | None,
        sinks: torch.Tensor | None,
        enable_pdl: bool | None,
    ) -> Any:
        problem = self._problem
        if problem is None:
            raise ValueError("plan() must be called before run(), and again after new workspaces")
        sm_scale, v_factor, head_scales = problem.sm_scale, 1.0, None
        if args and problem.variant is None:
            q_scale, k_scale, v_scale = scales_by_position(args, q_scale, k_scale, v_scale)
            args = ()
        if not (q_scale is None and k_scale is None and v_scale is None):
            factor, v_factor, head_scales = self._scales(problem, q_scale, k_scale, v_scale)
            sm_scale *= factor
        if window_left is None:
            window_left = problem.window_left
        elif window_left != problem.window_left:
            window_left = _narrower(problem.window_left, window_left)
        if not isinstance(q, torch.Tensor):
            raise TypeError(f"`q` must be a torch.Tensor, got {type(q).__name__}")
        if q.ndim != 3:
            raise ValueError(f"`q` must have 3 dimensions, got shape {list(q.shape)}")
        if out is None:
            if problem.o_data_type is q.dtype and problem.head_dim_vo == q.shape[-1]:
                out = torch.empty_like(q)
            else:
                shape = (*q.shape[:-1], problem.head_dim_vo)
                out = torch.empty(shape, dtype=problem.o_data_type, device=q.device)
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        if problem.variant is not None:
            args = self._additional(problem, args, sinks)
        if self._use_cuda_graph and torch.cuda.is_current_stream_capturing():
            self._capture(problem)
        self._executor.run(
            *(q, k, v, out, lse, sm_scale, v_factor, window_left, sinks, enable_pdl, args),
            head_scales,
        )
        return (out, lse) if return_lse else out

    def _scales(
        self, problem: AttentionProblem, q_scale: Any, k_scale: Any, v_scale: Any
    ) -> tuple[float, float, HeadScales | None]:
        heads = (problem.num_qo_heads, problem.num_kv_heads)
        scales = split_scales(self.device, *heads, q_scale, k_scale, v_scale)
        if scales[2] is not None and problem.variant is not None:
            raise ValueError(
                "`q_scale`, `k_scale` and `v_scale` must be numbers with `jit_args`: hooks read "
                "own tensors"
            )
        return scales

    def _additional(
        self, problem: AttentionProblem, args: tuple[Any, ...], sinks: torch.Tensor | None
    ) -> tuple[Any, ...]:
        """Values of the variant's additional tensors and scalars.

        Tensors that a plan knows (``maybe_custom_mask``, ...) are filled in, as in FlashInfer.
        """
        if sinks is not None:
            raise ValueError("`sinks` must be left out with `jit_args`: hooks read own tensors")
        variant = problem.variant
        assert variant is not None
        known: dict[str, Any] = {
            "maybe_custom_mask": problem.custom_mask,
            "maybe_mask_indptr": problem.mask_indptr,
            "maybe_alibi_slopes": problem.alibi_slopes,
            "maybe_prefix_len_ptr": problem.prefix_len_ptr,
            "maybe_token_pos_in_items_ptr": problem.token_pos_in_items_ptr,
            "maybe_max_item_len_ptr": problem.max_item_len_ptr,
        }
        wanted = [name for name in variant.tensor_names if name not in known]
        wanted += variant.scalar_names
        if len(args) != len(wanted):
            raise TypeError(
                f"run() needs the additional tensors and scalars of `jit_args`, {wanted}, got "
                f"{len(args)} values"
            )
        return tuple(prepare_jit_additional_args(variant.tensor_names, known, args))

    # --- CUDA graphs --------------------------------------------------------------------------

    def _capture(self, problem: AttentionProblem) -> None:
        assert self._plan_problem is not None
        if problem is not self._plan_problem and not covers(self._plan_problem, problem):
            raise ValueError(
                "`causal` and `window_left` of forward() must not show more keys than those of "
                "plan() while a CUDA graph is captured: later plans would leave them out"
            )
        self._captured = self._frozen(self._plan_problem)

    def _frozen(self, problem: AttentionProblem) -> dict[str, Any]:
        """What a captured launch contains and a plan cannot change."""
        executor = self._executor
        tensors = (
            *("kv_indices", "custom_mask", "mask_indptr", "alibi_slopes", "prefix_len_ptr"),
            *("token_pos_in_items_ptr", "max_item_len_ptr"),
        )
        return {
            **{name: getattr(problem, name) for name in FROZEN},
            **{
                name: None if (t := getattr(problem, name)) is None else t.data_ptr()
                for name in tensors
            },
            "mask": problem.mask_mode,
            "fixed_split_size": self._split[0],
            "disable_split_kv": self._split[1],
            "float_workspace_buffer": executor.float_workspace.data_ptr(),
            "int_workspace_buffer": executor.int_workspace.data_ptr(),
        }

    def _check_captured(self, problem: AttentionProblem) -> None:
        assert self._captured is not None
        now = self._frozen(problem)
        changed = [name for name, value in self._captured.items() if now[name] != value]
        if changed:
            raise ValueError(
                f"`{changed[0]}` must stay what it was when a CUDA graph was captured, "
                f"{self._captured[changed[0]]}, got {now[changed[0]]}: the graph would not see it"
            )


FROZEN = (
    *("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size", "kv_layout"),
    *("q_data_type", "kv_data_type", "o_data_type", "sm_scale", "window_left"),
    *("logits_soft_cap", "pos_encoding_mode", "rope_scale", "rope_theta", "variant"),
    *("tokens_per_request", "token_pos_in_items_len"),
)


def split_cache(
    paged_kv_cache: Any, name: str = "paged_kv_cache"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and values of a cache, None for values if it holds both."""
    if isinstance(paged_kv_cache, torch.Tensor):
        return paged_kv_cache, None
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        raise TypeError(
            f"`{name}` must be a torch.Tensor or a tuple of two, got "
            f"{type(paged_kv_cache).__name__}"
        )
    k, v = paged_kv_cache
    for i, part in enumerate((k, v)):
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"`{name}[{i}]` must be a torch.Tensor, got {type(part).__name__}")
    return k, v


def _narrower(planned: int, window_left: int) -> int:
    """A window given to run(): keys outside the planned one were left out of the plan."""
    window_left = check_window(window_left)
    if planned >= 0 and not 0 <= window_left <= planned:
        raise ValueError(
            f"`window_left` of run() must be from 0 to the {planned} of plan(), got {window_left}"
        )
    return window_left
