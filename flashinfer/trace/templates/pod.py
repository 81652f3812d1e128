"""Templates and references of launches that compute prefill and decode side by side."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..._common.checks import choice
from ..._common.checks import tensor as check_tensor
from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .attention import (
    _FLOAT8,
    _FLOAT16,
    _HEAD_RULES,
    _HEAD_SCALES,
    _HEADS,
    indices,
    kv_tensor,
)
from .attention_arguments import (
    _SCALES,
    POS_ENCODINGS,
    _check_planned,
    _in_use,
    _split_scales,
    pages_of,
    predict_planned,
    problem_arguments,
)
from .attention_reference import _paged_attention_reference, _single_attention_reference

Arguments = Mapping[str, Any]
_OWN = ("window_left", "pos_encoding_mode", "rope_scale", "rope_theta")
"""Options that each part of a `PODWithPagedKVCacheWrapper.run` has for itself."""


def _pod_reference(
    q_p: torch.Tensor,
    k_p: torch.Tensor,
    v_p: torch.Tensor,
    q_d: torch.Tensor,
    k_cache_d: torch.Tensor,
    v_cache_d: torch.Tensor,
    kv_indptr_d: torch.Tensor,
    kv_indices_d: torch.Tensor,
    kv_last_page_len_d: torch.Tensor,
    sm_scale: float,
    sm_scale_d: float,
    v_scale: float = 1.0,
    v_scale_p: float = 1.0,
    causal_p: bool = False,
    window_left: int = -1,
    pos_encoding_mode: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    window_left_d: int = -1,
    pos_encoding_mode_d: str = "NONE",
    rope_scale_d: float = 1.0,
    rope_theta_d: float = 1e4,
    custom_mask_p: torch.Tensor | None = None,
    custom_mask_d: torch.Tensor | None = None,
    return_lse_p: bool = False,
    return_lse_d: bool = False,
    q_head_scale_p: torch.Tensor | None = None,
    k_head_scale_p: torch.Tensor | None = None,
    v_head_scale_p: torch.Tensor | None = None,
    q_head_scale_d: torch.Tensor | None = None,
    k_head_scale_d: torch.Tensor | None = None,
    v_head_scale_d: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """o_p = softmax(sm_scale q_p k_p^T + mask) v_p v_scale_p of one request, and o_d likewise of
    each request of a batch with one query each, whose keys are in pages, with the options that end
    in _d and v_scale.

    Source: as attention_reference.py states; A. K. Kamath et al., "POD-Attention: Unlocking Full
    Prefill-Decode Overlap for Faster LLM Inference", 2025.
    """
    o_p, lse_p = _single_attention_reference(
        q_p,
        k_p,
        v_p,
        sm_scale=sm_scale,
        window_left=window_left,
        pos_encoding_mode=pos_encoding_mode,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        v_scale=v_scale_p,
        causal=causal_p,
        custom_mask=custom_mask_p,
        q_head_scale=q_head_scale_p,
        k_head_scale=k_head_scale_p,
        v_head_scale=v_head_scale_p,
    )
    table = (kv_indptr_d, kv_indices_d, kv_last_page_len_d)
    o_d, lse_d = _paged_attention_reference(
        q_d,
        k_cache_d,
        v_cache_d,
        *table,
        sm_scale=sm_scale_d,
        window_left=window_left_d,
        pos_encoding_mode=pos_encoding_mode_d,
        rope_scale=rope_scale_d,
        rope_theta=rope_theta_d,
        v_scale=v_scale,
        q_head_scale=q_head_scale_d,
        k_head_scale=k_head_scale_d,
        v_head_scale=v_head_scale_d,
        custom_mask=custom_mask_d,
    )
    prefill = (o_p, lse_p) if return_lse_p else (o_p,)
    return (*prefill, o_d, lse_d) if return_lse_d else (*prefill, o_d)


def _batch_pod_reference(
    q_p: torch.Tensor,
    k_cache_p: torch.Tensor,
    v_cache_p: torch.Tensor,
    qo_indptr_p: torch.Tensor,
    kv_indptr_p: torch.Tensor,
    kv_indices_p: torch.Tensor,
    kv_last_page_len_p: torch.Tensor,
    q_d: torch.Tensor,
    k_cache_d: torch.Tensor,
    v_cache_d: torch.Tensor,
    qo_indptr_d: torch.Tensor,
    kv_indptr_d: torch.Tensor,
    kv_indices_d: torch.Tensor,
    kv_last_page_len_d: torch.Tensor,
    sm_scale: float,
    sm_scale_d: float,
    v_scale: float = 1.0,
    v_scale_p: float = 1.0,
    causal_p: bool = False,
    window_left: int = -1,
    pos_encoding_mode: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 1e4,
    custom_mask_p: torch.Tensor | None = None,
    return_lse: bool = False,
    q_head_scale_p: torch.Tensor | None = None,
    k_head_scale_p: torch.Tensor | None = None,
    v_head_scale_p: torch.Tensor | None = None,
    q_head_scale_d: torch.Tensor | None = None,
    k_head_scale_d: torch.Tensor | None = None,
    v_head_scale_d: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """o = softmax(sm_scale q k^T + mask) v v_scale_p of each request of either batch, whose keys
    are in pages; of the second with sm_scale_d and v_scale.

    Source: as _pod_reference.
    """
    options: dict[str, Any] = {
        "window_left": window_left,
        "pos_encoding_mode": pos_encoding_mode,
        "rope_scale": rope_scale,
        "rope_theta": rope_theta,
    }
    o_p, lse_p = _paged_attention_reference(
        q_p,
        k_cache_p,
        v_cache_p,
        kv_indptr_p,
        kv_indices_p,
        kv_last_page_len_p,
        qo_indptr=qo_indptr_p,
        sm_scale=sm_scale,
        v_scale=v_scale_p,
        causal=causal_p,
        custom_mask=custom_mask_p,
        q_head_scale=q_head_scale_p,
        k_head_scale=k_head_scale_p,
        v_head_scale=v_head_scale_p,
        **options,
    )
    o_d, lse_d = _paged_attention_reference(
        q_d,
        k_cache_d,
        v_cache_d,
        kv_indptr_d,
        kv_indices_d,
        kv_last_page_len_d,
        qo_indptr=qo_indptr_d,
        sm_scale=sm_scale_d,
        v_scale=v_scale,
        q_head_scale=q_head_scale_d,
        k_head_scale=k_head_scale_d,
        v_head_scale=v_head_scale_d,
        **options,
    )
    return (o_p, lse_p, o_d, lse_d) if return_lse else (o_p, o_d)


# ---- arguments ---------------------------------------------------------------------------------


def _problems(run: Arguments) -> tuple[Any, Any]:
    """Both parts of a call, by the wrapper's own rules."""
    wrapper = run.get("self")
    if wrapper is None:
        raise ValueError("plan() must be called before run(), and again after new workspaces")
    choice("use_fp16_qk_reduction", run.get("use_fp16_qk_reduction", False), (False,))
    if run.get("args"):
        raise TypeError("run() has no additional arguments")
    defaults = inspect.signature(type(wrapper).run).parameters
    call = {name: run.get(name, parameter.default) for name, parameter in defaults.items()}
    problems: tuple[Any, Any] = wrapper._problems_of(call)
    return problems


def _checked(part: str, problem: Any, q: Any, k: Any, v: Any) -> None:
    try:
        _check_planned(problem, q, k, v)
    except ValueError as error:
        raise ValueError(re.sub(r"^`(\w+)`", rf"`\1_{part}`", str(error))) from None


def _options(problems: tuple[Any, Any], run: Arguments, device: torch.device) -> dict[str, Any]:
    """Options of the prefill, and the scales of both parts."""
    inputs = problem_arguments(problems[0], run, device, (1.0, 1.0))
    kept = {name: inputs[name] for name in (*_OWN, "o_dtype") if name in inputs}
    of_parts = (("p", "_p", "sm_scale"), ("d", "", "sm_scale_d"))
    for problem, (part, suffix, logits) in zip(problems, of_parts, strict=True):
        scales = {f"{name}{suffix}": run.get(f"{name}{suffix}") for name in _SCALES}
        q, heads = run[f"q_{part}"], problem.spec.num_kv_heads
        factor, v_scale, of_heads = _split_scales(scales, q, heads)
        kept[logits] = problem.spec.sm_scale * factor
        kept |= _in_use(**{f"v_scale{suffix}": (v_scale, 1.0)})
        kept |= {f"{name}_{part}": scale for name, scale in of_heads.items()}
    return kept | {"enable_pdl": run.get("enable_pdl")}


def _paged_part(part: str, problem: Any, run: Arguments) -> dict[str, Any]:
    q = check_tensor(f"q_{part}", run[f"q_{part}"], 3)
    k, v = pages_of(f"paged_kv_cache_{part}", run[f"paged_kv_cache_{part}"], problem.spec.kv_layout)
    _checked(part, problem, q, k, v)
    page_size = problem.requests.page_size
    if k.shape[1] != page_size:
        name = f"paged_kv_cache_{part}"
        raise ValueError(f"`{name}` must have pages of {page_size}, got {k.shape[1]}")
    inputs = problem_arguments(problem, run, q.device, (1.0, 1.0))
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "custom_mask")
    found = {f"{name}_{part}": inputs[name] for name in names if name in inputs}
    return {f"q_{part}": q, f"k_cache_{part}": k, f"v_cache_{part}": v, **found}


def _gather_pod(run: Arguments) -> dict[str, Any]:
    prefill, decode = _problems(run)
    q, k, v = (check_tensor(name, run[name], 3) for name in ("q_p", "k_p", "v_p"))
    if prefill.spec.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"`v_p` must have {k.shape[0]} tokens as `k_p` has, got {v.shape[0]}")
    _checked("p", prefill, q, k, v)
    own, others = (problem_arguments(of, run, q.device, (1.0, 1.0)) for of in (prefill, decode))
    second = _paged_part("d", decode, run)
    second |= {f"{name}_d": others[name] for name in _OWN if name in others}
    del second["qo_indptr_d"]  # one query each
    return {
        "q_p": q,
        "k_p": k,
        "v_p": v,
        **second,
        "causal_p": own["causal"],
        "custom_mask_p": own.get("custom_mask"),
        "return_lse_p": run.get("return_lse_p", False),
        "return_lse_d": run.get("return_lse_d", False),
        **_options((prefill, decode), run, q.device),
    }


def _gather_batch_pod(run: Arguments) -> dict[str, Any]:
    prefill, decode = _problems(run)
    return {
        **_paged_part("p", prefill, run),
        **_paged_part("d", decode, run),
        "causal_p": prefill.spec.causal and prefill.mask_mode != "custom",
        "return_lse": run.get("return_lse", False),
        **_options((prefill, decode), run, run["q_p"].device),
    }


# ---- templates ---------------------------------------------------------------------------------

_LSE = "Base-2 logarithm of the sum of exponentials; -inf: no key in sight."
_SCALARS: dict[str, Value] = {
    "sm_scale": Scalar("float32", description="Factor of the logits of the prefill."),
    "sm_scale_d": Scalar("float32", description="Factor of the logits of the decoding part."),
    "v_scale": Scalar("float32", optional=True, description="Factor of the decoding results."),
    "v_scale_p": Scalar("float32", optional=True, description="Factor of the prefill's results."),
    "window_left": Scalar("int32", optional=True, description="Keys before the query's, in sight."),
    "rope_scale": Scalar("float32", optional=True, above=0, description="Divides positions."),
    "rope_theta": Scalar("float32", optional=True, above=0, description="Base of frequencies."),
}
_DECODE_SCALARS = {f"{name}_d": _SCALARS[name] for name in _OWN if name in _SCALARS}
_PART_SCALES: dict[str, Value] = {
    f"{name}_{part}": scale for part in "pd" for name, scale in _HEAD_SCALES.items()
}


def _queries(part: str) -> Tensor:
    dims = [f"tokens_{part}", "num_qo_heads", "head_dim_qk"]
    free = {"dtypes": (*_FLOAT16, *_FLOAT8)} if part == "p" else {"dtype_from": "q_p"}
    return Tensor(dims, layout="rows", **free)


def _mask(part: str) -> Tensor:
    return Tensor(
        [f"mask_size_{part}"],
        dtype="bool",
        optional=True,
        description="[qo_len, kv_len] of each request.",
    )


def _cache(part: str) -> dict[str, Value]:
    page = [f"num_pages_{part}", "page_size"]
    first = "k_cache_p" if part == "p" else None
    keys = kv_tensor(page)
    if part == "d":
        keys = Tensor([*page, "num_kv_heads", "head_dim_qk"], layout="rows")
    return {f"k_cache_{part}": keys, f"v_cache_{part}": kv_tensor(page, first or f"k_cache_{part}")}


def _table(part: str) -> dict[str, Value]:
    return {
        f"kv_indptr_{part}": indices(f"len_indptr_{part}", "First entry of each in kv_indices."),
        f"kv_indices_{part}": indices(f"num_kv_indices_{part}", "Page numbers."),
        f"kv_last_page_len_{part}": indices(f"batch_size_{part}", "Tokens in each last page."),
    }


def _axes(part: str) -> dict[str, Axis]:
    return {
        f"tokens_{part}": Var("Queries."),
        f"num_pages_{part}": Var("Pages of the cache."),
        f"num_kv_indices_{part}": Var("Pages of all requests."),
        f"batch_size_{part}": Var("Requests."),
        f"len_indptr_{part}": Var("Requests + 1."),
        f"mask_size_{part}": Var("Sum of qo_len * kv_len."),
    }


def _outputs(lse: tuple[bool, bool]) -> dict[str, Value]:
    outputs: dict[str, Value] = {}
    for part, wanted in zip("pd", lse, strict=True):
        tokens = [f"tokens_{part}", "num_qo_heads"]
        outputs[f"output_{part}"] = Tensor(
            [*tokens, "head_dim_vo"], dtype_from_scalar="o_dtype", dtypes=_FLOAT16
        )
        if wanted:
            outputs[f"lse_{part}"] = Tensor(tokens, dtype="float32", description=_LSE)
    return outputs


def _nest(lse: tuple[bool, bool]) -> Callable[[tuple[Any, ...]], Any]:
    def nest(results: tuple[Any, ...]) -> Any:
        split = 2 if lse[0] else 1
        return tuple(
            part if len(part) > 1 else part[0] for part in (results[:split], results[split:])
        )

    return nest


_PAGE: dict[str, Axis] = {"page_size": Const("Tokens of a page.", abbrev="ps")}


def _pod_template(lse: tuple[bool, bool]) -> TraceTemplate:
    suffix = "".join(f"_lse_{part}" for part, wanted in zip("pd", lse, strict=True) if wanted)
    return TraceTemplate(
        op_type="pod_attention",
        name_prefix=f"pod{suffix}",
        description="Attention of one request, and of a batch with one query each, in one launch.",
        axes={
            "tokens_p": Var("Queries of the request."),
            "kv_len_p": Var("Its keys."),
            "mask_size_p": Var("tokens_p * kv_len_p."),
            **_HEADS,
            **_PAGE,
            **{name: axis for name, axis in _axes("d").items()},
        },
        inputs={
            "q_p": _queries("p"),
            "k_p": kv_tensor(["kv_len_p"]),
            "v_p": kv_tensor(["kv_len_p"], "k_p"),
            "q_d": _queries("d"),
            **_cache("d"),
            **_table("d"),
            **_SCALARS,
            **_DECODE_SCALARS,
            **_PART_SCALES,
            "custom_mask_p": _mask("p"),
            "custom_mask_d": _mask("d"),
        },
        outputs=_outputs(lse),
        constraints=["len_indptr_d == batch_size_d + 1", *_HEAD_RULES],
        options={
            "causal_p": (False, True),
            "pos_encoding_mode": POS_ENCODINGS,
            "pos_encoding_mode_d": POS_ENCODINGS,
            "return_lse_p": (lse[0],),
            "return_lse_d": (lse[1],),
        },
        hints=["enable_pdl"],
        tags=["status:verified"],
        reference=_pod_reference,
        gather=_gather_pod,
        predict=predict_planned,
        nest=_nest(lse),
    )


def _batch_pod_template(lse: bool) -> TraceTemplate:
    return TraceTemplate(
        op_type="pod_attention",
        name_prefix="batch_pod_lse" if lse else "batch_pod",
        description="Attention of two batches, one that prefills and one that decodes.",
        axes={**_axes("p"), **_HEADS, **_PAGE, **_axes("d")},
        inputs={
            "q_p": _queries("p"),
            **_cache("p"),
            "qo_indptr_p": indices("len_indptr_p", "First query of each request."),
            **_table("p"),
            "q_d": _queries("d"),
            **_cache("d"),
            "qo_indptr_d": indices("len_indptr_d", "First query of each request."),
            **_table("d"),
            **_SCALARS,
            **_PART_SCALES,
            "custom_mask_p": _mask("p"),
        },
        outputs=_outputs((lse, lse)),
        constraints=[
            "len_indptr_p == batch_size_p + 1",
            "len_indptr_d == batch_size_d + 1",
            *_HEAD_RULES,
        ],
        options={
            "causal_p": (False, True),
            "pos_encoding_mode": POS_ENCODINGS,
            "return_lse": (lse,),
        },
        hints=["enable_pdl"],
        tags=["status:verified"],
        reference=_batch_pod_reference,
        gather=_gather_batch_pod,
        predict=predict_planned,
        nest=_nest((lse, lse)),
    )


_POD = {(p, d): _pod_template((p, d)) for p in (False, True) for d in (False, True)}
_BATCH_POD = {lse: _batch_pod_template(lse) for lse in (False, True)}


def pod_run_trace(**arguments: Any) -> TraceTemplate:
    """The template by what of a `PODWithPagedKVCacheWrapper.run` is returned."""
    for name in ("return_lse_p", "return_lse_d"):
        choice(name, arguments.get(name, False), (False, True))
    return _POD[arguments.get("return_lse_p", False), arguments.get("return_lse_d", False)]


def batch_pod_run_trace(**arguments: Any) -> TraceTemplate:
    """The template of a `BatchPODWithPagedKVCacheWrapper.run` with or without LSE."""
    choice("return_lse", arguments.get("return_lse", False), (False, True))
    return _BATCH_POD[arguments.get("return_lse", False)]


pod_run_trace.templates = list(_POD.values())  # type: ignore[attr-defined]
batch_pod_run_trace.templates = list(_BATCH_POD.values())  # type: ignore[attr-defined]
