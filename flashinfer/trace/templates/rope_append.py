"""Template and reference of the rotary embedding that appends keys and values to a paged cache.

The reference computes in float64; what goes to an 8-bit cache is limited to its finite range.
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


def _normalized(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Each head's RMS norm, if there is a weight, in float64."""
    x = x.double()
    if weight is None:
        return x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def _cached(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """x * scale, limited to the finite range of an 8-bit dtype."""
    scaled = x.double() * scale
    limit = torch.finfo(dtype).max
    return scaled.clamp(-limit, limit) if dtype.itemsize == 1 else scaled


def _rope_append_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    is_neox: bool = True,
    quant_scale_k: float = 1.0,
    quant_scale_v: float = 1.0,
    kv_layout: str = "NHD",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm and rotation of q and k; k and v are written as append_paged_kv_cache does.

    Source: J. Su et al., "RoFormer", 2021; B. Zhang, R. Sennrich, "Root Mean Square Layer
    Normalization", 2019.
    """
    cos, sin = _cached_angles(cos_sin_cache, pos_ids)
    q, k = _normalized(q, q_weight, eps), _normalized(k, k_weight, eps)
    turned = _rotate(k, cos, sin, not is_neox)
    written = []
    rows = (turned, quant_scale_k), (v, quant_scale_v)
    for cache, (row, scale) in zip(paged_kv_cache, rows, strict=True):
        result = cache.double()
        by_slot = result.transpose(1, 2) if kv_layout == "HND" else result
        sizes = by_slot.shape[:2]
        tokens, page, slot = _slots(batch_indices, positions, kv_indices, kv_indptr, *sizes)
        by_slot[page, slot] = _cached(row, scale, cache.dtype)[tokens]
        written.append(result)
    return _rotate(q, cos, sin, not is_neox), written[0], written[1]


_AXES: dict[str, Axis] = {
    "num_tokens": Var("Tokens of all requests."),
    "num_qo_heads": Const("Heads of the query.", abbrev="q"),
    "num_kv_heads": Const("Heads of keys and values.", abbrev="kv"),
    "head_dim": Const("Elements of a head of queries and keys.", abbrev="d"),
    "v_dim": Const("Elements of a value head.", abbrev="v"),
    "max_position": Var("Rows of the cos-sin cache."),
}
_CONSTRAINTS = ["head_dim >= 2", "head_dim % 2 == 0", "len_indptr >= 1"]


def _heads(which: str, last: str, **properties: Any) -> Tensor:
    return Tensor(["num_tokens", f"num_{which}_heads", last], layout="rows", **properties)


def _weight(of: str) -> Tensor:
    return Tensor(
        ["head_dim"],
        dtype_from="q",
        layout="rows",
        optional=True,
        description=f"Weights of an RMS norm of each head of {of}, before the rotation.",
    )


def _init(kv_layout: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Values of an example call: 7 pages of 4 slots, 2 heads of K and V."""
    q = arguments["q"]
    page = (7, 4, 2) if kv_layout == "NHD" else (7, 2, 4)
    values = _example(
        q,
        q=(7, 4, 32),
        k=(7, 2, 32),
        v=(7, 2, 48),
        q_weight=(32,),
        k_weight=(32,),
        cos_sin_cache=(100, 32),
        pos_ids=[3, 0, 17, 99, 4, 5, 6],
        first=(*page, 32),
        second=(*page, 48),
    )
    values["cos_sin_cache"] = values["cos_sin_cache"].float()
    values["paged_kv_cache"] = values.pop("first"), values.pop("second")
    pages = example_table(q.device)
    del pages["kv_last_page_len"]
    factors = {"eps": 1e-6, "quant_scale_k": 1.0, "quant_scale_v": 1.0}
    return {**values, **pages, **factors, "page_size": 4, "kv_layout": kv_layout}


def appended(
    kv_layout: str, sizes: tuple[str, str], dtypes: tuple[str, ...]
) -> tuple[dict[str, Axis], dict[str, Value], dict[str, Value]]:
    """Axes of a paged cache, both caches with their heads' sizes, and the table to append by."""
    inner = ["page_size", "num_kv_heads"]
    inner = inner if kv_layout == "NHD" else inner[::-1]
    axes = {key: axis for key, axis in _TABLE_AXES.items() if key != "batch_size"}
    axes["num_pages"] = Var("Pages of the caches.")
    axes["page_size"] = Const("Slots of a page.", abbrev="ps")
    caches: dict[str, Value] = {
        f"{name}_cache": Tensor(
            ["num_pages", *inner, size],
            param="paged_kv_cache",
            tuple_idx=i,
            dtypes=(*dtypes, "float8_e4m3fn", "float8_e5m2"),
            layout="rows",
        )
        for i, (name, size) in enumerate(zip("kv", sizes, strict=True))
    }
    table = {key: spec for key, spec in _TABLE.items() if key != "kv_last_page_len"}
    return axes, caches, table


def cos_sin_rows() -> Tensor:
    return Tensor(
        ["max_position", "head_dim"],
        dtypes=FLOATING,
        layout="rows",
        description="Row of each position: head_dim / 2 cosines, then as many sines.",
    )


def by_layout(template: Callable[[str, str], TraceTemplate]) -> Callable[..., TraceTemplate]:
    """The template of a call's `kv_layout`, made by `template` of a suffix and the layout."""
    templates = {"NHD": template("", "NHD"), "HND": template("_hnd", "HND")}

    def trace(**arguments: Any) -> TraceTemplate:
        kv_layout = arguments.get("kv_layout", "NHD")
        choice("kv_layout", kv_layout, ("NHD", "HND"))
        return templates[kv_layout]

    trace.templates = list(templates.values())  # type: ignore[attr-defined]
    return trace


def _template(suffix: str, kv_layout: str) -> TraceTemplate:
    page_axes, caches, table = appended(kv_layout, ("head_dim", "v_dim"), FLOATING)
    return TraceTemplate(
        op_type="rope_append",
        name_prefix=f"rope_append_paged_kv_cache{suffix}",
        description="Rotary position embedding, with a norm of heads; K and V go to a paged cache.",
        axes={**_AXES, **page_axes},
        inputs={
            "q": _heads("qo", "head_dim", dtypes=FLOATING),
            "k": _heads("kv", "head_dim", dtype_from="q"),
            "v": _heads("kv", "v_dim", dtype_from="q"),
            "cos_sin_cache": cos_sin_rows(),
            "pos_ids": _POS_IDS,
            **caches,
            **table,
            "q_weight": _weight("q"),
            "k_weight": _weight("k"),
            "eps": Scalar(minimum=0, description="Added to the mean of the squares."),
            "quant_scale_k": Scalar(above=0, description="Factor of keys in the cache."),
            "quant_scale_v": Scalar(above=0, description="Factor of values in the cache."),
        },
        outputs={
            "q_out": _heads("qo", "head_dim", param="q", dtype_from="q"),
            **caches,
        },
        constraints=_CONSTRAINTS,
        options={"is_neox": (True, False), "kv_layout": (kv_layout,)},
        hints=["enable_pdl"],
        tags=["status:verified", "fused"],
        reference=_rope_append_reference,
        init=functools.partial(_init, kv_layout),
    )


rope_append_paged_kv_cache_trace = by_layout(_template)
