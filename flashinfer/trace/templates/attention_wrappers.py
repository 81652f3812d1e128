"""Templates of mixed batches, attention with sinks, and cascades."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..._attention.checks import check_profile
from ..._common.checks import tensor as check_tensor
from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .attention import (
    _FLOAT8,
    _FLOAT16,
    _HEAD_RULES,
    _HEAD_SCALES,
    _HEADS,
    by_lse,
    indices,
    kv_tensor,
    paged_template,
)
from .attention_arguments import (
    _SCALES,
    POS_ENCODINGS,
    _check_planned,
    _split_scales,
    gather_paged,
    pages_of,
    planned_problem,
    predict_planned,
    problem_arguments,
)
from .attention_reference import _paged_attention_reference
from .cascade import _merge

Arguments = Mapping[str, Any]


def sink_arguments(
    spec: Any, args: tuple[Any, ...], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, float]:
    """Sinks of a call, and the factor between the logits' scale and the planned one.

    Raises
    ------
    TypeError, ValueError
        Unless sinks are given once, and at most a scale after them.
    """
    given = list(args)
    if sinks is None:
        if not given:
            raise TypeError("`sinks` must follow the cache: run(q, paged_kv_cache, sink, sm_scale)")
        sinks = given.pop(0)
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"`sinks` must be a torch.Tensor, got {type(sinks).__name__}")
    if len(given) > 1:
        raise TypeError(f"run() takes the sinks and `sm_scale`, got {len(given)} values more")
    if not given or given[0] is None or spec is None:
        return sinks, 1.0
    if isinstance(given[0], bool) or not isinstance(given[0], (int, float)):
        raise TypeError(f"`sm_scale` must be a number, got {type(given[0]).__name__}")
    if spec.sm_scale == 0.0:
        raise ValueError("`sm_scale` of run() must be left out where that of plan() is 0")
    return sinks, given[0] / spec.sm_scale


def _cascade_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    level_sizes: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    v_scale: float = 1.0,
    q_head_scale: torch.Tensor | None = None,
    k_head_scale: torch.Tensor | None = None,
    v_head_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """o = softmax(sm_scale q k^T + mask) v v_scale of each query, over the keys that it has on all
    levels; on each the queries are divided into requests anew. `causal` concerns the last level.

    Source: Z. Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch
    Decoding", 2024.
    """
    sizes = level_sizes.tolist()
    first, page = 0, 0
    outputs, sums = [], []
    for level, size in enumerate(sizes):
        bounds = slice(first + level, first + level + size + 1)
        starts = kv_indptr[bounds]
        o, lse = _paged_attention_reference(
            q,
            k_cache,
            v_cache,
            starts,
            kv_indices[page : page + int(starts[-1])],
            kv_last_page_len[first : first + size],
            sm_scale,
            qo_indptr=qo_indptr[bounds],
            causal=causal and level == len(sizes) - 1,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            pos_encoding_mode=pos_encoding_mode,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            v_scale=v_scale,
            q_head_scale=q_head_scale,
            k_head_scale=k_head_scale,
            v_head_scale=v_head_scale,
        )
        outputs.append(o)
        sums.append(lse)
        first, page = first + size, page + int(starts[-1])
    return _merge(torch.stack(outputs, 1), torch.stack(sums, 1))[0]


# ---- arguments ---------------------------------------------------------------------------------


def _gather_batch_attention(run: Arguments) -> dict[str, Any]:
    problem = planned_problem(run)
    check_profile(problem.spec.profiled, run.get("profiler_buffer"))
    cap = run.get("logits_soft_cap")
    planned = problem.spec.logits_soft_cap
    if cap and cap != planned:
        raise ValueError(f"`logits_soft_cap` must be 0 or the {planned} of plan(), got {cap}")
    return gather_paged(run, "kv_cache")


def _gather_sinks(run: Arguments) -> dict[str, Any]:
    sinks, factor = sink_arguments(planned_problem(run).spec, run.get("args", ()), run.get("sinks"))
    inputs = gather_paged(run, args=())
    return {**inputs, "sinks": sinks, "sm_scale": inputs["sm_scale"] * factor}


def _gather_cascade(run: Arguments) -> dict[str, Any]:
    wrapper = run.get("self")
    problems: list[Any] = [
        getattr(level, "_problem", None) for level in getattr(wrapper, "_wrappers", [])
    ]
    if not problems or any(problem is None for problem in problems):
        raise ValueError("plan() must be called before run(), and again after new workspaces")
    q, last = check_tensor("q", run["q"], 3), problems[-1]
    k, v = pages_of("paged_kv_cache", run["paged_kv_cache"], last.spec.kv_layout)
    _check_planned(last, q, k, v)
    page_size = last.requests.page_size
    if k.shape[1] != page_size:
        raise ValueError(f"`paged_kv_cache` must have pages of {page_size}, got {k.shape[1]}")
    scales = {name: run.get(name) for name in _SCALES}
    factor, v_scale, of_heads = _split_scales(scales, q, last.spec.num_kv_heads)
    numbers = (factor, v_scale)
    levels = [problem_arguments(problem, run, q.device, numbers) for problem in problems]
    for level in levels:
        level["kv_indices"] = level["kv_indices"][: int(level["kv_indptr"][-1])]
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
    sizes = [problem.requests.batch_size for problem in problems]
    shared = {k: x for k, x in levels[-1].items() if k not in (*names, "sinks", "custom_mask")}
    return {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "level_sizes": torch.tensor(sizes, dtype=torch.int32, device=q.device),
        **{name: torch.cat([level[name] for level in levels]) for name in names},
        **shared,
        **of_heads,
    }


# ---- templates ---------------------------------------------------------------------------------


def _batch_attention_template() -> TraceTemplate:
    template = paged_template(
        name="batch_attention",
        description="Attention of a batch in which requests decode or prefill, over pages.",
        init=None,
        gather=_gather_batch_attention,
        lse=True,
    )
    # The LSE is always returned, and there is no choice of how the kernel is launched.
    template.name_prefix, template.hints = "batch_attention", ()
    return template


_AXES: dict[str, Axis] = {
    "total_q": Var("Queries."),
    **_HEADS,
    "num_pages": Var("Pages of the cache."),
    "page_size": Const("Tokens of a page.", abbrev="ps"),
    "num_levels": Const("Levels.", abbrev="l"),
    "len_indptr": Var("Requests of all levels, and one more for each level."),
    "num_requests": Var("Requests of all levels."),
    "num_kv_indices": Var("Pages of all levels' requests."),
}
_SCALARS: dict[str, Value] = {
    "sm_scale": Scalar("float32", description="Factor of the logits."),
    "v_scale": Scalar("float32", optional=True, description="Factor of the result."),
    "window_left": Scalar("int32", optional=True, description="Keys before the query's, in sight."),
    "logits_soft_cap": Scalar("float32", optional=True, above=0, description="cap tanh(x / cap)."),
    "rope_scale": Scalar("float32", optional=True, above=0, description="Divides positions."),
    "rope_theta": Scalar("float32", optional=True, above=0, description="Base of frequencies."),
}
_PAGE = ["num_pages", "page_size"]

batch_attention_run_trace = _batch_attention_template()
sink_run_trace = by_lse(
    paged_template,
    heads_first=True,
    name="attention_sink",
    description="Attention of ragged queries over pages, with one more logit per head.",
    init=None,
    gather=_gather_sinks,
)
cascade_run_trace = TraceTemplate(
    op_type="cascade",
    name_prefix="cascade_attention",
    description="Attention over several levels of keys that requests share in part.",
    axes=_AXES,
    inputs={
        "q": Tensor(
            ["total_q", "num_qo_heads", "head_dim_qk"],
            dtypes=(*_FLOAT16, *_FLOAT8),
            layout="rows",
        ),
        "k_cache": kv_tensor(_PAGE),
        "v_cache": kv_tensor(_PAGE, "k_cache"),
        "level_sizes": indices("num_levels", "Requests of each level."),
        "qo_indptr": indices("len_indptr", "First query of each request, level by level."),
        "kv_indptr": indices("len_indptr", "First of its level's page numbers, likewise."),
        "kv_indices": indices("num_kv_indices", "Page numbers, level by level."),
        "kv_last_page_len": indices("num_requests", "Tokens in each request's last page."),
        **_SCALARS,
        **_HEAD_SCALES,
    },
    outputs={
        "output": Tensor(
            ["total_q", "num_qo_heads", "head_dim_vo"],
            dtype_from_scalar="o_dtype",
            dtypes=_FLOAT16,
        )
    },
    constraints=["len_indptr == num_requests + num_levels", *_HEAD_RULES],
    options={"causal": (False, True), "pos_encoding_mode": POS_ENCODINGS},
    tags=["status:verified"],
    reference=_cascade_reference,
    gather=_gather_cascade,
    predict=predict_planned,
)
