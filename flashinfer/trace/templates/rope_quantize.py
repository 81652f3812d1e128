"""Templates and references of rotary embeddings with an 8-bit result.

The references compute in float64, limit results to the finite range of the 8-bit dtype and do not
round them. A missing `nope` part is one without columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..._common.checks import choice
from ..specs import FLOATING, Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .page import _TABLE, _TABLE_AXES, _slots, example_table
from .rope import _POS_IDS, _cached_angles, _example, _rotate

_FP8 = ("float8_e4m3fn", "float8_e5m2")


def _quantize(y: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """y * scale, limited to the finite range of `dtype`."""
    limit = torch.finfo(dtype).max
    return (y.double() * scale).clamp(-limit, limit)


def _chosen_dtype(quantize_dtype: torch.dtype | None, **outs: torch.Tensor | None) -> torch.dtype:
    """The dtype asked for, else that of the first given output, else float8_e4m3fn.

    Every given output must have it.
    """
    given = {name: out.dtype for name, out in outs.items() if out is not None}
    dtype = quantize_dtype or next(iter(given.values()), torch.float8_e4m3fn)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"`quantize_dtype` must be a torch.dtype, got {dtype!r}")
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"`quantize_dtype` must be float8_e4m3fn or float8_e5m2, got {dtype}")
    for name, other in given.items():
        if other != dtype:
            raise ValueError(f"`{name}` must have dtype {dtype}, got {other}")
    return dtype


def _rotated(
    rope: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool
) -> torch.Tensor:
    """Rotate [tokens, heads, dim], or [tokens, dim] of one head."""
    heads = rope if rope.ndim == 3 else rope[:, None]
    return _rotate(heads, cos, sin, not is_neox).reshape(rope.shape)


def _rope_quantize_fp8_reference(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out = saturate(rope(x) * scale) of the rotary parts, saturate(x * scale) of the others.

    Source: J. Su et al., "RoFormer", 2021; P. Micikevicius et al., "FP8 Formats for Deep
    Learning", 2022.
    """
    dtype = _chosen_dtype(
        quantize_dtype,
        q_rope_out=q_rope_out,
        k_rope_out=k_rope_out,
        q_nope_out=q_nope_out,
        k_nope_out=k_nope_out,
    )
    cos, sin = _cached_angles(cos_sin_cache, pos_ids)
    q_nope = q_rope[..., :0] if q_nope is None else q_nope
    k_nope = k_rope[..., :0] if k_nope is None else k_nope
    return (
        _quantize(_rotated(q_rope, cos, sin, is_neox), quant_scale_q, dtype),
        _quantize(_rotated(k_rope, cos, sin, is_neox), quant_scale_kv, dtype),
        _quantize(q_nope, quant_scale_q, dtype),
        _quantize(k_nope, quant_scale_kv, dtype),
    )


def _mla_rope_quantize_fp8_reference(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As rope_quantize_fp8, with keys of one head.

    Source: as rope_quantize_fp8.
    """
    dtype = _chosen_dtype(
        quantize_dtype,
        q_rope_out=q_rope_out,
        k_rope_out=k_rope_out,
        q_nope_out=q_nope_out,
        k_nope_out=k_nope_out,
    )
    cos, sin = _cached_angles(cos_sin_cache, pos_ids)
    return (
        _quantize(_rotated(q_rope, cos, sin, is_neox), quant_scale_q, dtype),
        _quantize(_rotated(k_rope, cos, sin, is_neox), quant_scale_kv, dtype),
        _quantize(q_nope, quant_scale_q, dtype),
        _quantize(k_nope, quant_scale_kv, dtype),
    )


def _rope_quantize_fp8_append_paged_kv_cache_reference(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    kv_layout: str = "NHD",
    q_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As rope_quantize_fp8, with K and V written to their slots as append_paged_kv_cache does.

    Source: as rope_quantize_fp8.
    """
    caches = {f"paged_kv_cache[{i}]": cache for i, cache in enumerate(paged_kv_cache)}
    outs = {"q_rope_out": q_rope_out, "q_nope_out": q_nope_out, **caches}
    dtype = _chosen_dtype(quantize_dtype, **outs)
    cos, sin = _cached_angles(cos_sin_cache, pos_ids)
    q_nope = q_rope[..., :0] if q_nope is None else q_nope
    k_nope = k_rope[..., :0] if k_nope is None else k_nope
    k_rotated = _quantize(_rotated(k_rope, cos, sin, is_neox), quant_scale_kv, dtype)
    k_copied = _quantize(k_nope, quant_scale_kv, dtype)
    if v is None:
        rows = [x.reshape(len(x), 1, x.shape[-1]) for x in (k_copied, k_rotated)]
    else:
        rows = [torch.cat([k_rotated, k_copied], -1), _quantize(v, quant_scale_kv, dtype)]
    written = []
    for cache, row in zip(paged_kv_cache, rows, strict=True):
        result = cache.double()
        by_slot = result[:, :, None] if v is None else result
        by_slot = by_slot.transpose(1, 2) if v is not None and kv_layout == "HND" else by_slot
        sizes = by_slot.shape[:2]
        tokens, page, slot = _slots(batch_indices, positions, kv_indices, kv_indptr, *sizes)
        by_slot[page, slot] = row[tokens]
        written.append(result)
    return (
        _quantize(_rotated(q_rope, cos, sin, is_neox), quant_scale_q, dtype),
        _quantize(q_nope, quant_scale_q, dtype),
        written[0],
        written[1],
    )


_AXES: dict[str, Axis] = {
    "num_tokens": Var("Tokens of all requests."),
    "num_qo_heads": Const("Heads of the query.", abbrev="q"),
    "rope_dim": Const("Elements of a head that are rotated.", abbrev="r"),
    "q_nope_dim": Const("Other elements of a query head.", abbrev="qn", derive=lambda v: 0),
    "k_nope_dim": Const("Other elements of a key head.", abbrev="kn", derive=lambda v: 0),
    "max_position": Var("Rows of the cos-sin cache."),
}
_KV_HEADS: dict[str, Axis] = {"num_kv_heads": Const("Heads of keys.", abbrev="kv")}
_SCALES: dict[str, Value] = {
    "quant_scale_q": Scalar(above=0, description="Factor of the results of q."),
    "quant_scale_kv": Scalar(above=0, description="Factor of the results of k (and v)."),
}
_CACHE = Tensor(
    ["max_position", "rope_dim"],
    dtypes=FLOATING,
    layout="rows",
    description="Row of each position: rope_dim / 2 cosines, then as many sines.",
)
_CONSTRAINTS = ["rope_dim >= 2", "rope_dim % 2 == 0"]


def _heads(which: str, last: str, **properties: Any) -> Tensor:
    """[tokens, heads, last] of q or of several key heads; [tokens, last] of one key head."""
    heads = {"q": ["num_qo_heads"], "kv": ["num_kv_heads"], "one": []}[which]
    return Tensor(["num_tokens", *heads, last], layout="rows", **properties)


def _out(which: str, last: str, param: str) -> Tensor:
    return _heads(
        which,
        last,
        param=param,
        dtypes=_FP8,
        dtype_from_scalar="quantize_dtype",
        dtype_default="float8_e4m3fn",
    )


def _inputs(keys: str, *, optional: bool) -> dict[str, Value]:
    return {
        "q_rope": _heads("q", "rope_dim", dtypes=FLOATING),
        "k_rope": _heads(keys, "rope_dim", dtype_from="q_rope"),
        "q_nope": _heads("q", "q_nope_dim", dtype_from="q_rope", optional=optional),
        "k_nope": _heads(keys, "k_nope_dim", dtype_from="q_rope", optional=optional),
    }


def _init(keys: str, **more: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        q_rope = arguments["q_rope"]
        heads = (2,) if keys == "kv" else ()
        values = _example(
            q_rope,
            q_rope=(7, 4, 32),
            k_rope=(7, *heads, 32),
            q_nope=(7, 4, 64),
            k_nope=(7, *heads, 64),
            cos_sin_cache=(100, 32),
            pos_ids=[3, 0, 17, 99, 4, 5, 6],
        )
        values["cos_sin_cache"] = values["cos_sin_cache"].float()
        factors = {"quant_scale_q": 1.0, "quant_scale_kv": 1.0}
        return {**values, **factors, "quantize_dtype": torch.float8_e4m3fn, **more}

    return init


def _quantize_template(
    name: str, reference: Callable[..., Any], keys: str, *, optional: bool, backend: bool
) -> TraceTemplate:
    options: dict[str, tuple[Any, ...]] = {"is_neox": (True, False)}
    options |= {"backend": ("cuda",)} if backend else {}
    return TraceTemplate(
        op_type="rope_quantize",
        name_prefix=name,
        description="Rotary position embedding of q and k with an 8-bit float result.",
        axes={**_AXES, **({} if keys == "one" else _KV_HEADS)},
        inputs={
            **_inputs(keys, optional=optional),
            "cos_sin_cache": _CACHE,
            "pos_ids": _POS_IDS,
            **_SCALES,
        },
        outputs={
            "q_rope_out": _out("q", "rope_dim", "q_rope_out"),
            "k_rope_out": _out(keys, "rope_dim", "k_rope_out"),
            "q_nope_out": _out("q", "q_nope_dim", "q_nope_out"),
            "k_nope_out": _out(keys, "k_nope_dim", "k_nope_out"),
        },
        constraints=_CONSTRAINTS,
        options=options,
        hints=["enable_pdl"],
        tags=["status:verified", "fused", "quantize"],
        reference=reference,
        init=_init(keys),
    )


_GQA = _quantize_template(
    "rope_quantize_fp8", _rope_quantize_fp8_reference, "kv", optional=True, backend=True
)
_ONE_HEAD = _quantize_template(
    "rope_quantize_fp8_one_head", _rope_quantize_fp8_reference, "one", optional=True, backend=True
)


def _rope_quantize_fp8_trace(**arguments: Any) -> TraceTemplate:
    return _ONE_HEAD if getattr(arguments.get("k_rope"), "ndim", 3) == 2 else _GQA


rope_quantize_fp8_trace: Callable[..., TraceTemplate] = _rope_quantize_fp8_trace
rope_quantize_fp8_trace.templates = [_GQA, _ONE_HEAD]  # type: ignore[attr-defined]

mla_rope_quantize_fp8_trace = _quantize_template(
    "mla_rope_quantize_fp8",
    _mla_rope_quantize_fp8_reference,
    "one",
    optional=False,
    backend=False,
)


def _append_init(mla: bool, kv_layout: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Values of an example call: 7 pages of 4 slots, and 2 heads of K and V unless it is MLA."""
    values = _init("one" if mla else "kv")(arguments)
    q_rope = arguments["q_rope"]
    page = (7, 4) if mla else (7, 4, 2) if kv_layout == "NHD" else (7, 2, 4)
    dims = (64, 32) if mla else (96, 48)
    shapes = [(*page, dim) for dim in dims]
    both = _example(q_rope, first=shapes[0], second=shapes[1])
    values["paged_kv_cache"] = tuple(x.to(torch.float8_e4m3fn) for x in both.values())
    values["v"] = None if mla else _example(q_rope, v=(7, 2, 48))["v"]
    pages = example_table(q_rope.device)
    del pages["kv_last_page_len"]
    return {**values, **pages, "page_size": 4, "kv_layout": kv_layout}


def _append_template(suffix: str, *, mla: bool, kv_layout: str) -> TraceTemplate:
    keys = "one" if mla else "kv"
    axes: dict[str, Axis] = {**_AXES, **({} if mla else _KV_HEADS), **_TABLE_AXES}
    del axes["batch_size"]
    axes["num_pages"] = Var("Pages of the caches.")
    axes["page_size"] = Const("Slots of a page.", abbrev="ps")
    inputs = _inputs(keys, optional=True)
    if mla:
        names = ("ckv_cache", "k_nope_dim"), ("kpe_cache", "rope_dim")
        inner = ["page_size"]
    else:
        axes["k_dim"] = Const(
            "rope_dim + k_nope_dim.", abbrev="", derive=lambda v: v["rope_dim"] + v["k_nope_dim"]
        )
        axes["v_dim"] = Const("Elements of a value head.", abbrev="v")
        inputs["v"] = _heads("kv", "v_dim", dtype_from="q_rope")
        names = ("k_cache", "k_dim"), ("v_cache", "v_dim")
        inner = ["page_size", "num_kv_heads"]
        inner = inner if kv_layout == "NHD" else inner[::-1]
    caches: dict[str, Value] = {
        name: Tensor(
            ["num_pages", *inner, last],
            param="paged_kv_cache",
            tuple_idx=i,
            dtypes=_FP8,
            layout="rows",
        )
        for i, (name, last) in enumerate(names)
    }
    table = {key: spec for key, spec in _TABLE.items() if key != "kv_last_page_len"}
    constraints = ["len_indptr >= 1", *_CONSTRAINTS]
    if not mla:
        constraints.append("k_dim == rope_dim + k_nope_dim")
    return TraceTemplate(
        op_type="rope_quantize",
        name_prefix=f"rope_quantize_fp8_append_paged_kv_cache{suffix}",
        description="Rotary position embedding with an 8-bit result; K and V go to a paged cache.",
        axes=axes,
        inputs={
            **inputs,
            "cos_sin_cache": _CACHE,
            "pos_ids": _POS_IDS,
            **caches,
            **table,
            **_SCALES,
        },
        outputs={
            "q_rope_out": _out("q", "rope_dim", "q_rope_out"),
            "q_nope_out": _out("q", "q_nope_dim", "q_nope_out"),
            **caches,
        },
        constraints=constraints,
        options={"is_neox": (True, False), "kv_layout": ("NHD", "HND") if mla else (kv_layout,)}
        | ({"v": (None,)} if mla else {}),
        hints=["enable_pdl"],
        tags=["status:verified", "fused", "quantize"],
        reference=_rope_quantize_fp8_append_paged_kv_cache_reference,
        init=functools.partial(_append_init, mla, kv_layout),
    )


_APPEND_TEMPLATES = {
    "mla": _append_template("_mla", mla=True, kv_layout="NHD"),
    "NHD": _append_template("", mla=False, kv_layout="NHD"),
    "HND": _append_template("_hnd", mla=False, kv_layout="HND"),
}


def _append_trace(**arguments: Any) -> TraceTemplate:
    kv_layout = arguments.get("kv_layout", "NHD")
    choice("kv_layout", kv_layout, ("NHD", "HND"))
    return _APPEND_TEMPLATES["mla" if arguments.get("v") is None else kv_layout]


rope_quantize_fp8_append_paged_kv_cache_trace: Callable[..., TraceTemplate] = _append_trace
rope_quantize_fp8_append_paged_kv_cache_trace.templates = list(  # type: ignore[attr-defined]
    _APPEND_TEMPLATES.values()
)
