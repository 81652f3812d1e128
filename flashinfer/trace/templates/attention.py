"""Templates of the attention functions and of the wrappers' `run`.

A definition is stated in one form, whatever the call's form was (see attention_arguments.py), and
what a wrapper's `plan` was given is part of it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..._common.checks import choice
from ...jit.attention.config import CODES, check_output_scale
from ..check import default_check
from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .attention_arguments import (
    POS_ENCODINGS,
    gather_paged,
    gather_paged_decode,
    gather_ragged,
    gather_single_decode,
    gather_single_prefill,
    planned_problem,
    predict_planned,
    predict_single,
)
from .attention_reference import (
    _paged_attention_reference,
    _paged_codes_reference,
    _ragged_attention_reference,
    _single_attention_reference,
)

_FLOAT16 = ("bfloat16", "float16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


_HEADS: dict[str, Axis] = {
    "num_qo_heads": Const("Heads of the queries.", abbrev="h"),
    "num_kv_heads": Const("Heads of keys and values.", abbrev="kv"),
    "head_dim_qk": Const("Elements of a head of queries and keys.", abbrev="d"),
    "head_dim_vo": Const("Elements of a head of values and results.", abbrev="dv"),
}
_HEAD_RULES = [
    "num_kv_heads >= 1",
    "num_qo_heads >= 1",
    "num_qo_heads % num_kv_heads == 0",
    "head_dim_qk % 16 == 0 and 16 <= head_dim_qk <= 512",
    "head_dim_vo % 16 == 0 and 16 <= head_dim_vo <= 512",
]
_SCALARS: dict[str, Value] = {
    "sm_scale": Scalar("float32", description="Factor of the logits."),
    "v_scale": Scalar("float32", optional=True, description="Factor of the result."),
    "window_left": Scalar("int32", optional=True, description="Keys before the query's, in sight."),
    "logits_soft_cap": Scalar("float32", optional=True, above=0, description="cap tanh(x / cap)."),
    "rope_scale": Scalar("float32", optional=True, above=0, description="Divides positions."),
    "rope_theta": Scalar("float32", optional=True, above=0, description="Base of frequencies."),
}
_SINKS = Tensor(["num_qo_heads"], dtype="float32", optional=True, description="Logit of no key.")
_HEAD_SCALES: dict[str, Value] = {
    f"{operand}_head_scale": Tensor(
        [f"num_{heads}_heads"],
        dtype="float32",
        optional=True,
        description=f"Factor of each head of {what}.",
    )
    for operand, heads, what in (("q", "qo", "queries"), ("k", "kv", "keys"), ("v", "kv", "values"))
}
_ITEMS: dict[str, Value] = {
    "prefix_len_ptr": Tensor(
        ["batch_size"], dtype="int32", optional=True, description="Keys in front of the items."
    ),
    "token_pos_in_items_ptr": Tensor(
        ["batch_size", "items_len"],
        dtype="int32",
        optional=True,
        description="Place of each key behind the prefix in its item; 0: a delimiter.",
    ),
}
_BATCH: dict[str, Axis] = {
    "batch_size": Var("Requests."),
    "len_indptr": Var("batch_size + 1."),
    "mask_size": Var("Sum of qo_len * kv_len."),
    "items_len": Var("Entries of token_pos_in_items_ptr per request."),
}
_MASK = Tensor(
    ["mask_size"], dtype="bool", optional=True, description="[qo_len, kv_len] of each request."
)
_FLAGS: dict[str, tuple[Any, ...]] = {
    "causal": (False, True),
    "pos_encoding_mode": POS_ENCODINGS,
}


def _lse_options(heads_first: bool) -> dict[str, tuple[Any, ...]]:
    return {"lse_base": ("log2", "ln"), "lse_layout": ("HN" if heads_first else "NH",)}


_LSE = "Base-2 logarithm of the sum of exponentials; -inf: no key in sight."


def indices(axis: str, description: str) -> Tensor:
    return Tensor([axis], dtype="int32", description=description)


def _queries(*tokens: str, with_8_bits: bool = True) -> Tensor:
    dtypes = (*_FLOAT16, *_FLOAT8) if with_8_bits else _FLOAT16
    return Tensor([*tokens, "num_qo_heads", "head_dim_qk"], dtypes=dtypes, layout="rows")


def kv_tensor(dims: list[str], like: str | None = None) -> Tensor:
    """Keys, whose dtype is free, or values, whose dtype is that of the keys."""
    if like is not None:
        return Tensor([*dims, "num_kv_heads", "head_dim_vo"], dtype_from=like, layout="rows")
    dtypes = (*_FLOAT16, *_FLOAT8)
    return Tensor([*dims, "num_kv_heads", "head_dim_qk"], dtypes=dtypes, layout="rows")


def results(
    tokens: list[str],
    *,
    lse: bool,
    destination: bool,
    o_dtype: bool = True,
    heads_first: bool = False,
    codes: bool = False,
) -> dict[str, Value]:
    """The outputs: the result, with `lse` the LSE, of `heads_first` [heads, tokens].

    `codes`: the result has 8 bits, with a scale for each token's head.
    """
    outputs: dict[str, Value] = {
        "output": Tensor(
            [*tokens, "num_qo_heads", "head_dim_vo"],
            param="out" if destination else None,
            dtype_from_scalar="o_dtype" if o_dtype else None,
            dtype_from=None if o_dtype else "q",
            dtypes=_FLOAT8[:1] if codes else _FLOAT16,
        )
    }
    if codes:
        outputs["out_scale"] = Tensor(
            [*tokens, "num_qo_heads"],
            param="out_scale",
            dtype="float32",
            returned=False,
            description="Factor of a head's codes.",
        )
    if lse:
        outputs["lse"] = Tensor(
            ["num_qo_heads", *tokens] if heads_first else [*tokens, "num_qo_heads"],
            param="lse" if destination else None,
            dtype="float32",
            description=_LSE,
        )
    return outputs


def paged_template(
    name: str,
    description: str,
    init: Any,
    gather: Any,
    *,
    lse: bool,
    decode: bool = False,
    heads_first: bool = False,
    codes: bool = False,
) -> TraceTemplate:
    """Template of a `run` whose keys are in pages."""
    tokens = "batch_size" if decode else "total_q"
    page = ["num_pages", "page_size"]
    axes: dict[str, Axis] = {} if decode else {"total_q": Var("Queries of all requests.")}
    axes |= {
        **_HEADS,
        "num_pages": Var("Pages of the cache."),
        "page_size": Const("Tokens of a page.", abbrev="ps"),
        "num_kv_indices": Var("Pages of all requests."),
        **_BATCH,
    }
    qo_indptr = {} if decode else {"qo_indptr": indices("len_indptr", "First query of each.")}
    return TraceTemplate(
        op_type="gqa_paged",
        name_prefix=_prefix(name, lse, heads_first),
        description=description,
        axes=axes,
        inputs={
            "q": _queries(tokens),
            "k_cache": kv_tensor(page),
            "v_cache": kv_tensor(page, "k_cache"),
            **qo_indptr,
            "kv_indptr": indices("len_indptr", "First entry of each request in kv_indices."),
            "kv_indices": indices("num_kv_indices", "Page numbers."),
            "kv_last_page_len": indices("batch_size", "Tokens in each request's last page."),
            **_SCALARS,
            **({} if codes else {"custom_mask": _MASK}),
            "sinks": _SINKS,
            **({} if codes else _ITEMS),
            **_HEAD_SCALES,
        },
        outputs=results([tokens], lse=lse, destination=True, heads_first=heads_first, codes=codes),
        constraints=["len_indptr == batch_size + 1", *_HEAD_RULES],
        options=_FLAGS | ({} if decode or not lse else _lse_options(heads_first)),
        hints=["enable_pdl"],
        tags=["status:verified"],
        reference=_paged_codes_reference if codes else _paged_attention_reference,
        check=_near_codes if codes else None,
        gather=gather,
        predict=predict_planned,
        init=init,
    )


def _near_codes(expected: Any, actual: Any) -> bool:
    """Codes and scales near those of the reference; the LSE by its dtype."""
    (codes, scale, *others), (got, got_scale, *got_others) = expected, actual
    if got.shape != codes.shape or got.dtype != codes.dtype or got_scale.shape != scale.shape:
        return False
    codes, scale = codes.to(got.device), scale.to(got.device)
    if not torch.allclose(got_scale, scale, rtol=0.01, atol=0.0, equal_nan=True):
        return False
    x, y = codes.float() * scale[..., None], got.float() * got_scale[..., None]
    # Half a step of both codes; and sums of terms that cancel are off by a part of the largest.
    room = x.abs() * 2**-3 + scale[..., None] * 448 * 2**-8
    if not bool(((y - x).abs() <= room).logical_or(~x.isfinite()).all()):
        return False
    # A soft cap moves all logits of a row alike.
    return default_check(tuple(others), tuple(got_others), rtol=0.0, atol=5e-3, min_cos_sim=None)


def _prefix(name: str, lse: bool, heads_first: bool) -> str:
    return name + ("_lse" if lse else "") + ("_heads_first" if heads_first else "")


def ragged_template(
    name: str, init: Any, gather: Any, *, lse: bool, heads_first: bool = False
) -> TraceTemplate:
    """Template of a `run` whose keys are rows one request after the other."""
    return TraceTemplate(
        op_type="gqa_ragged",
        name_prefix=_prefix(name, lse, heads_first),
        description="Attention of ragged queries over ragged keys and values.",
        axes={
            "total_q": Var("Queries of all requests."),
            "total_kv": Var("Keys of all requests."),
            **_HEADS,
            **_BATCH,
        },
        inputs={
            "q": _queries("total_q"),
            "k": kv_tensor(["total_kv"]),
            "v": kv_tensor(["total_kv"], "k"),
            "qo_indptr": indices("len_indptr", "First query of each request."),
            "kv_indptr": indices("len_indptr", "First key of each request."),
            **_SCALARS,
            "custom_mask": _MASK,
            "sinks": _SINKS,
            **_ITEMS,
            **_HEAD_SCALES,
        },
        outputs=results(["total_q"], lse=lse, destination=True, heads_first=heads_first),
        constraints=["len_indptr >= 1", *_HEAD_RULES],
        options=_FLAGS | (_lse_options(heads_first) if lse else {}),
        hints=["enable_pdl"],
        tags=["status:verified"],
        reference=_ragged_attention_reference,
        gather=gather,
        predict=predict_planned,
        init=init,
    )


def _single_template(name: str, init: Any, *, lse: bool, decode: bool) -> TraceTemplate:
    tokens = [] if decode else ["qo_len"]
    axes: dict[str, Axis] = {} if decode else {"qo_len": Var("Queries.")}
    mask: dict[str, Value] = {
        "custom_mask": Tensor(
            ["qo_len", "kv_len"], dtype="bool", optional=True, description="Which keys are seen."
        )
    }
    return TraceTemplate(
        op_type="gqa_single",
        name_prefix=f"{name}_lse" if lse else name,
        description="Attention of one request.",
        axes={**axes, "kv_len": Var("Keys."), **_HEADS},
        inputs={
            "q": _queries(*tokens, with_8_bits=not decode),
            "k": kv_tensor(["kv_len"]),
            "v": kv_tensor(["kv_len"], "k"),
            **_SCALARS,
            **({} if decode else mask),
            **_HEAD_SCALES,
        },
        outputs=results(tokens, lse=lse, destination=False, o_dtype=not decode),
        constraints=_HEAD_RULES,
        options={"pos_encoding_mode": POS_ENCODINGS} if decode else _FLAGS,
        tags=["status:verified"],
        reference=_single_attention_reference,
        gather=gather_single_decode if decode else gather_single_prefill,
        predict=predict_single,
        init=lambda arguments: {**init(arguments), "return_lse": lse},
    )


def by_lse(
    make: Callable[..., TraceTemplate], *, heads_first: bool = False, **properties: Any
) -> Callable[..., TraceTemplate]:
    """A dispatch function between the template without and the one with the LSE.

    An `lse` to write to that is not asked back is written and not returned. `heads_first`: whether
    the call can ask for an LSE [heads, tokens].
    """
    without, returned = make(lse=False, **properties), make(lse=True, **properties)
    turned = make(lse=True, heads_first=True, **properties) if heads_first else None
    written = {template: _not_returned(template) for template in (returned, turned) if template}

    def choose(**arguments: Any) -> TraceTemplate:
        return_lse = arguments.get("return_lse", False)
        choice("return_lse", return_lse, (False, True))
        if turned is not None:
            choice("lse_base", arguments.get("lse_base", "log2"), ("log2", "ln"))
            choice("lse_layout", arguments.get("lse_layout", "NH"), ("NH", "HN"))
        if not return_lse and arguments.get("lse") is None:
            return without
        template = returned
        if turned is not None:
            template = turned if arguments.get("lse_layout", "NH") == "HN" else returned
        return template if return_lse else written[template]

    choose.templates = [without, *written]  # type: ignore[attr-defined]
    return choose


def _not_returned(template: TraceTemplate) -> TraceTemplate:
    """The template of a call that writes its LSE and does not return it."""
    changed = copy.copy(template)
    spec = template.outputs["lse"]
    assert isinstance(spec, Tensor)
    changed.outputs = {**template.outputs, "lse": dataclasses.replace(spec, returned=False)}
    return changed


def _single_init(decode: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        q = arguments["q"]
        dtype = torch.float16 if q.dtype == torch.float32 else q.dtype
        generator = torch.Generator().manual_seed(q.numel())

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(q.device, dtype)

        query = (6, 32) if decode else (5, 6, 32)
        return {
            "q": values(*query),
            "k": values(9, 2, 32),
            "v": values(9, 2, 32),
            "sm_scale": 0.3,
            **({} if decode else {"causal": True}),
        }

    return init


single_decode_with_kv_cache_trace = by_lse(
    _single_template, name="single_decode", init=_single_init(True), decode=True
)
single_prefill_with_kv_cache_trace = by_lse(
    _single_template, name="single_prefill", init=_single_init(False), decode=False
)
_DECODE = "Attention of one query per request over its keys and values in pages."
_one_query = by_lse(
    paged_template,
    name="gqa_paged_decode",
    description=_DECODE,
    init=None,
    gather=gather_paged_decode,
    decode=True,
)
_several_queries = by_lse(
    paged_template,
    name="gqa_paged_decode_multi",
    description=_DECODE.replace("one query", "a few queries"),
    init=None,
    gather=gather_paged_decode,
)


_one_query_codes = by_lse(
    paged_template,
    name="gqa_paged_decode_codes",
    description=f"{_DECODE[:-1]}, with results of 8 bits.",
    init=None,
    gather=gather_paged_decode,
    decode=True,
    codes=True,
)
_several_queries_codes = by_lse(
    paged_template,
    name="gqa_paged_decode_multi_codes",
    description=f"{_DECODE[:-1]}, with results of 8 bits.".replace("one query", "a few queries"),
    init=None,
    gather=gather_paged_decode,
    codes=True,
)


def _decode_trace(**arguments: Any) -> TraceTemplate:
    problem = planned_problem(arguments)
    several = problem.requests.tokens_per_request > 1
    check_output_scale(problem.spec.o_data_type, arguments.get("out_scale"))
    if problem.spec.o_data_type == CODES:
        return (_several_queries_codes if several else _one_query_codes)(**arguments)
    return (_several_queries if several else _one_query)(**arguments)


paged_decode_run_trace: Callable[..., TraceTemplate] = _decode_trace
paged_decode_run_trace.templates = [  # type: ignore[attr-defined]
    *_one_query.templates,  # type: ignore[attr-defined]
    *_several_queries.templates,  # type: ignore[attr-defined]
    *_one_query_codes.templates,  # type: ignore[attr-defined]
    *_several_queries_codes.templates,  # type: ignore[attr-defined]
]
paged_prefill_run_trace = by_lse(
    paged_template,
    name="gqa_paged_prefill",
    description="Attention of ragged queries over keys and values in pages.",
    init=None,
    gather=gather_paged,
    heads_first=True,
)
ragged_prefill_run_trace = by_lse(
    ragged_template, name="gqa_ragged_prefill", init=None, gather=gather_ragged, heads_first=True
)
