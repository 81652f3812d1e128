"""The base of the attention wrappers: workspaces, options, and the launch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ..._common.cache_layout import is_hnd, split_cache
from ..._common.checks import count as check_count
from ..._common.checks import flag as check_flag
from ..._common.checks import tensor as check_tensor
from ..._compile.handles import Planned
from ...jit.attention.config import PACKED_FLOAT4, check_output_scale
from ..backends import is_backend_supported, prepare_jit_additional_args
from ..checks import (
    HeadScales,
    check_backend,
    check_block_scales,
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
from ..plan.choice import BACKENDS
from ..plan.executor import AttentionExecutor
from ..plan.launch import NO_OPTIONS, PlanOptions
from ..plan.requests import AttentionProblem, CustomMask, ItemScoring, PlanTensors
from ..plan.spec import AttentionSpec
from .graphs import check_unchanged, fixed_by_capture

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_T = TypeVar("_T")


class SpecArguments(NamedTuple):
    """Arguments that a spec is made from, as the caller of ``plan`` gives them."""

    num_qo_heads: Any
    num_kv_heads: Any
    head_dim_qk: Any
    head_dim_vo: Any
    pos_encoding_mode: Any = "NONE"
    window_left: Any = -1
    logits_soft_cap: Any = None
    sm_scale: Any = None
    rope_scale: Any = None
    rope_theta: Any = None
    q_data_type: Any = None
    kv_data_type: Any = None
    o_data_type: Any = None
    causal: Any = False
    use_profiler: Any = False


def option_of_plan(name: str) -> property:
    """An option of the latest plan, None before the first: engines assert these."""
    return property(lambda self: self._problem and getattr(self._problem.spec, name))


class AttentionWrapper(Planned):
    """Base of the wrappers. Not thread-safe; different wrappers share nothing."""

    is_backend_supported = staticmethod(is_backend_supported)
    _backends: tuple[str, ...] = BACKENDS
    _executor_type: type[AttentionExecutor] = AttentionExecutor
    _makes_codes = False  # whether outputs may have 8 bits
    _window_left = option_of_plan("window_left")
    _logits_soft_cap = option_of_plan("logits_soft_cap")
    _sm_scale = option_of_plan("sm_scale")

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
        self._plan_options = NO_OPTIONS
        self._overrides: dict[str, Any] | None = None
        self._captured: dict[str, Any] | None = None
        self._known: dict[tuple[Any, ...], Any] = {}
        self._slopes: torch.Tensor | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for CUDA graphs."""
        return self._use_cuda_graph

    @property
    def _planned_results(self) -> tuple[int, torch.dtype] | None:
        """Columns and dtype of the results, as planned; a compiled graph depends on them."""
        return results_of(self._problem)

    @property
    def _plan_info(self) -> list[int] | None:
        """Query rows and requests of the latest plan: what engines keep, and compare."""
        requests = None if self._problem is None else self._problem.requests
        return requests and [requests.num_qo_tokens, requests.batch_size]

    @_plan_info.setter
    def _plan_info(self, info: list[int]) -> None:
        """Engines put here what `_cached_module.plan` has returned, which is known."""

    @property
    def _float_workspace_buffer(self) -> torch.Tensor:
        return self._executor.workspaces.floats

    @property
    def _int_workspace_buffer(self) -> torch.Tensor:
        return self._executor.workspaces.ints

    @_int_workspace_buffer.setter
    def _int_workspace_buffer(self, buffer: torch.Tensor) -> None:
        """Engines share one among wrappers that are planned anew before each run."""
        self.reset_workspace_buffer(self._executor.workspaces.floats, buffer)

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
        self._known = {}

    # --- Planning -----------------------------------------------------------------------------

    def _remembered(self, options: tuple[Any, ...], check: Callable[[], _T]) -> _T:
        """What `check` makes of options, or made of them last: plans differ in their batches."""
        try:
            known = self._known.get(options)
        except TypeError:  # an argument of a type that is refused
            known = None
        if known is None:
            known = check()
            if not any(isinstance(option, torch.Tensor) for option in options):
                self._known = {options: known}
        return known

    def _spec(self, arguments: SpecArguments) -> AttentionSpec:
        return self._remembered(arguments, lambda: self._checked_spec(arguments))

    def _checked_spec(self, a: SpecArguments) -> AttentionSpec:
        head_dim_qk = check_count("head_dim_qk", a.head_dim_qk)
        head_dim_vo = check_count("head_dim_vo", a.head_dim_vo)
        mode = a.pos_encoding_mode
        dtypes: Sequence[Any] = (a.q_data_type, a.kv_data_type, a.o_data_type)
        if self._jit_args is not None:
            mode = self._check_jit(a)
            dtypes = self._jit_args[1:4]
        q_dtype, kv_dtype, o_dtype = resolve_dtypes(*dtypes, with_codes=self._makes_codes)
        return AttentionSpec(
            num_qo_heads=check_count("num_qo_heads", a.num_qo_heads),
            num_kv_heads=check_count("num_kv_heads", a.num_kv_heads),
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_vo,
            q_data_type=q_dtype,
            kv_data_type=kv_dtype,
            o_data_type=o_dtype,
            sm_scale=logits_scale(a.sm_scale, head_dim_qk),
            causal=check_flag("causal", a.causal),
            window_left=check_window(a.window_left),
            logits_soft_cap=soft_cap(a.logits_soft_cap),
            pos_encoding_mode=check_pos_encoding(mode),
            rope_scale=positive("rope_scale", a.rope_scale, 1.0),
            rope_theta=positive("rope_theta", a.rope_theta, 1e4),
            kv_layout=self._kv_layout,
            variant=self._variant,
            backend=self._backend,
            profiled=check_flag("use_profiler", a.use_profiler),
        )

    def _check_jit(self, a: SpecArguments) -> str:
        """Refuse a plan that contradicts `jit_args`; returns the positional encoding."""
        assert self._jit_args is not None
        if self._jit_args[4] != torch.int32:
            raise ValueError(f"`jit_args`: idtype must be torch.int32, got {self._jit_args[4]}")
        for name, planned, given in (
            ("head_dim_qk", a.head_dim_qk, self._jit_args[5]),
            ("head_dim_vo", a.head_dim_vo, self._jit_args[6]),
        ):
            if planned != given:
                raise ValueError(f"`{name}` must be {given} as in `jit_args`, got {planned}")
        dtypes = (a.q_data_type, a.kv_data_type, a.o_data_type)
        names = ("q_data_type", "kv_data_type", "o_data_type")
        for name, planned, given in zip(names, dtypes, self._jit_args[1:4], strict=True):
            # "float16" is what a plan says that says nothing.
            if planned not in (None, "float16") and resolve_dtype(name, planned) != given:
                raise ValueError(f"`{name}` must be {given} as in `jit_args`, got {planned}")
        if soft_cap(a.logits_soft_cap) > 0.0:
            raise ValueError(
                "`logits_soft_cap` must be left out with `jit_args`: the variant's "
                f"LogitsTransform takes its place, got {a.logits_soft_cap}"
            )
        mode = self._jit_kwargs.get("pos_encoding_mode", 0)
        if mode not in (0, 1) or a.pos_encoding_mode == "ALIBI":
            raise ValueError(
                "`pos_encoding_mode` must be NONE or ROPE_LLAMA with `jit_args`, got "
                f"{a.pos_encoding_mode!r} and {mode!r} in `jit_kwargs`"
            )
        return "ROPE_LLAMA" if mode == 1 else a.pos_encoding_mode

    def _alibi_slopes(self, spec: AttentionSpec) -> torch.Tensor | None:
        """Slopes on the device, if the spec has any."""
        if spec.pos_encoding_mode != "ALIBI":
            return None
        known = self._slopes
        if known is None or known.shape[0] != spec.num_qo_heads or known.device != self.device:
            known = self._slopes = get_alibi_slopes(spec.num_qo_heads, self.device)
        return known

    def _check_plan_options(
        self, fixed_split_size: Any, disable_split_kv: Any, non_blocking: Any = True
    ) -> PlanOptions:
        if fixed_split_size is None and disable_split_kv is False and non_blocking is True:
            return NO_OPTIONS
        return PlanOptions(
            split_size(fixed_split_size),
            check_flag("disable_split_kv", disable_split_kv),
            None,
            check_flag("non_blocking", non_blocking),
        )

    def _plan(self, problem: AttentionProblem, options: PlanOptions) -> None:
        self._problem = self._overrides = None
        self._plan_options = options
        if self._captured is not None:
            check_unchanged(self._captured, self._fixed_by_capture(problem))
        self._executor.plan(problem, options)
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
        spec, requests, tensors = problem
        changed: dict[str, Any] = {
            "pos_encoding_mode": check_pos_encoding(options["pos_encoding_mode"]),
            "window_left": check_window(options["window_left"]),
            "logits_soft_cap": soft_cap(options["logits_soft_cap"]),
            "sm_scale": logits_scale(options["sm_scale"], spec.head_dim_qk),
            "rope_scale": positive("rope_scale", options["rope_scale"], 1.0),
            "rope_theta": positive("rope_theta", options["rope_theta"], 1e4),
        }
        if "causal" in options:
            changed["causal"] = check_flag("causal", options["causal"])
        now = dataclasses.replace(spec, **changed)
        if now != spec:
            causal = now.causal if tensors.mask is None else requests.causal
            problem = AttentionProblem(
                now,
                requests._replace(causal=causal, window_left=now.window_left),
                tensors._replace(alibi_slopes=self._alibi_slopes(now)),
            )
            self._executor.change_options(problem, keep_plan=self._captured is not None)
            self._problem = problem
        self._overrides = options

    # --- Running ------------------------------------------------------------------------------

    def _launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        args: tuple[Any, ...] = (),
        *,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
        out_scale: torch.Tensor | None = None,
    ) -> Any:
        problem = self._problem
        if problem is None:
            raise ValueError("plan() must be called before run(), and again after new workspaces")
        spec = problem.spec
        sm_scale, v_factor = spec.sm_scale, 1.0
        head_scales: Sequence[HeadScales] = ()
        if args and spec.variant is None:
            q_scale, k_scale, v_scale = scales_by_position(args, q_scale, k_scale, v_scale)
            args = ()
        if not (q_scale is None and k_scale is None and v_scale is None):
            factor, v_factor, head_scales = self._scales(spec, q_scale, k_scale, v_scale)
            sm_scale *= factor
        block_scales = None
        if kv_cache_sf is not None or spec.kv_data_type is PACKED_FLOAT4:
            check_block_scales(spec.kv_data_type, kv_cache_sf)
            block_scales = split_cache(kv_cache_sf, "kv_cache_sf")
        check_output_scale(spec.o_data_type, out_scale)
        if window_left is None:
            window_left = spec.window_left
        elif window_left != spec.window_left:
            window_left = _narrower(spec.window_left, window_left)
        check_tensor("q", q, 3)
        if out is None:
            if spec.o_data_type is q.dtype and spec.head_dim_vo == q.shape[-1]:
                out = torch.empty_like(q)
            else:
                shape = (*q.shape[:-1], spec.head_dim_vo)
                out = torch.empty(shape, dtype=spec.o_data_type, device=q.device)
        if return_lse is not False:
            check_flag("return_lse", return_lse)
        if lse is None and return_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        if spec.variant is not None:
            args = self._additional(problem, args, sinks)
        if self._use_cuda_graph and torch.cuda.is_current_stream_capturing():
            self._capture(problem)
        self._executor.run(
            q,
            k,
            v,
            out,
            lse,
            sm_scale=sm_scale,
            v_scale=v_factor,
            window_left=window_left,
            sinks=sinks,
            enable_pdl=enable_pdl,
            additional=args,
            head_scales=head_scales,
            block_scales=block_scales,
            output_scale=out_scale,
        )
        return (out, lse) if return_lse else out

    def _scales(
        self, spec: AttentionSpec, q_scale: Any, k_scale: Any, v_scale: Any
    ) -> tuple[float, float, Sequence[HeadScales]]:
        heads = (spec.num_qo_heads, spec.num_kv_heads)
        scales = split_scales(self.device, *heads, q_scale, k_scale, v_scale)
        if scales[2] and spec.variant is not None:
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
        variant = problem.spec.variant
        assert variant is not None
        known = _known_tensors(problem.tensors)
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
        """Note what is captured now: later plans have to be for it."""
        planned = self._plan_problem
        assert planned is not None
        if problem is not planned and not problem.requests.sees_no_more_than(planned.requests):
            raise ValueError(
                "`causal` and `window_left` of forward() must not show more keys than those of "
                "plan() while a CUDA graph is captured: later plans would leave them out"
            )
        self._captured = self._fixed_by_capture(planned)

    def _fixed_by_capture(self, problem: AttentionProblem) -> dict[str, Any]:
        return fixed_by_capture(problem, self._plan_options, self._executor.workspaces)


def results_of(problem: AttentionProblem | None) -> tuple[int, torch.dtype] | None:
    """Columns and dtype of the results of a planned problem."""
    return None if problem is None else (problem.spec.head_dim_vo, problem.spec.o_data_type)


def returning_lse(run: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The method ``run_return_lse`` of a wrapper."""

    def run_return_lse(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``run`` with ``return_lse=True``."""
        return cast(tuple[torch.Tensor, torch.Tensor], self.run(*args, return_lse=True, **kwargs))

    signature = inspect.signature(run)
    flag = inspect.Parameter("return_lse", inspect.Parameter.KEYWORD_ONLY, default=True)
    parameters = signature.parameters | {"return_lse": flag}
    run_return_lse.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(parameters.values())
    )
    return run_return_lse


def _known_tensors(tensors: PlanTensors) -> dict[str, Any]:
    """Tensors of a plan by the names that variants have for them."""
    mask = tensors.mask if isinstance(tensors.mask, CustomMask) else None
    items = tensors.mask if isinstance(tensors.mask, ItemScoring) else None
    return {
        "maybe_custom_mask": mask and mask.bits,
        "maybe_mask_indptr": mask and mask.indptr,
        "maybe_alibi_slopes": tensors.alibi_slopes,
        "maybe_prefix_len_ptr": items and items.prefix_len_ptr,
        "maybe_token_pos_in_items_ptr": items and items.token_pos_in_items_ptr,
        "maybe_max_item_len_ptr": items and items.max_item_len_ptr,
    }


def _narrower(planned: int, window_left: int) -> int:
    """A window given to run(): keys outside the planned one were left out of the plan."""
    window_left = check_window(window_left)
    if planned >= 0 and not 0 <= window_left <= planned:
        raise ValueError(
            f"`window_left` of run() must be from 0 to the {planned} of plan(), got {window_left}"
        )
    return window_left
