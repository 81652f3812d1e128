"""Template and reference of the product of a norm whose columns are heads."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..specs import Axis, Const, Scalar, Tensor, Var
from ..template import TraceTemplate
from .normed_product import _add_rmsnorm_mm_bf16_reference, row_of
from .page import example_table
from .rope import _POS_IDS
from .rope_append import _rope_append_reference, appended, by_layout, cos_sin_rows


def _heads_reference(
    input: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    b: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    head_eps: float = 1e-6,
    is_neox: bool = True,
    quant_scale_k: float = 1.0,
    quant_scale_v: float = 1.0,
    kv_layout: str = "NHD",
) -> tuple[torch.Tensor, ...]:
    """The product of add_rmsnorm_mm_bf16 as heads of q, k and v, for rope_append_paged_kv_cache.

    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019; J. Su et al.,
    "RoFormer", 2021.
    """
    product, total, normed = _add_rmsnorm_mm_bf16_reference(
        input, residual, norm_weight, b, bias, eps
    )
    dim, kv_heads = cos_sin_cache.shape[1], paged_kv_cache[0].shape[2 if kv_layout == "NHD" else 1]
    heads = product.view(len(input), -1, dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    rows = q, k, v, cos_sin_cache, pos_ids, paged_kv_cache
    table = kv_indices, kv_indptr, batch_indices, positions
    norms = q_weight, k_weight, head_eps
    q, k_cache, v_cache = _rope_append_reference(
        *rows, *table, *norms, is_neox, quant_scale_k, quant_scale_v, kv_layout
    )
    return q, total, normed, k_cache, v_cache


def _weight(of: str) -> Tensor:
    return Tensor(
        ["head_dim"],
        dtype="bfloat16",
        layout="rows",
        optional=True,
        description=f"Weights of an RMS norm of each head of {of}, before the rotation.",
    )


def _init(kv_layout: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Values of an example call: 7 pages of 4 slots, 2 heads of each kind."""
    device, generator = arguments["input"].device, torch.Generator().manual_seed(2)
    page = (7, 4, 2, 64) if kv_layout == "NHD" else (7, 2, 4, 64)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    def integers(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    table = example_table(device)
    return {
        "input": values(1, 64),
        "residual": values(1, 64),
        "norm_weight": values(64),
        "b": values(64, 384),
        "cos_sin_cache": values(100, 64).float(),
        "pos_ids": integers(17),
        "paged_kv_cache": (values(*page), values(*page)),
        "kv_indices": table["kv_indices"],
        "kv_indptr": table["kv_indptr"],
        "batch_indices": integers(2),
        "positions": integers(6),
        "q_weight": values(64),
        "k_weight": values(64),
        "quant_scale_k": 1.0,
        "quant_scale_v": 1.0,
        "kv_layout": kv_layout,
    }


_AXES: dict[str, Axis] = {
    "num_tokens": Var("Tokens: one."),
    "k": Const("Terms of each sum, at most 4096.", abbrev="k"),
    "n": Const("Elements of all heads.", abbrev="n"),
    "head_dim": Const("Elements of a head, 64 or 128.", abbrev="d"),
    "num_kv_heads": Const("Heads of keys and values.", abbrev="kv"),
    "num_qo_heads": Const(
        "Heads of queries.",
        abbrev="",
        derive=lambda sizes: sizes["n"] // sizes["head_dim"] - 2 * sizes["num_kv_heads"],
    ),
    "max_position": Var("Rows of the cos-sin cache."),
}


def _template(suffix: str, kv_layout: str) -> TraceTemplate:
    page_axes, caches, table = appended(kv_layout, ("head_dim", "head_dim"), ("bfloat16",))
    return TraceTemplate(
        op_type="rope_append",
        name_prefix=f"add_rmsnorm_mm_rope_append_bf16{suffix}",
        description="Product of a norm as heads, which are turned; K and V go to a paged cache.",
        axes={**_AXES, **page_axes},
        inputs={
            "input": row_of(["num_tokens", "k"], "Row."),
            "residual": row_of(["num_tokens", "k"], "What is added to it."),
            "norm_weight": Tensor(["k"], dtype="bfloat16", description="Weight of the norm."),
            "b": row_of(["k", "n"], "Weights of queries, keys and values."),
            "cos_sin_cache": cos_sin_rows(),
            "pos_ids": _POS_IDS,
            **caches,
            **table,
            "q_weight": _weight("q"),
            "k_weight": _weight("k"),
            "bias": Tensor(
                ["n"], dtype="bfloat16", optional=True, description="Added to the product."
            ),
            "eps": Scalar("float32", minimum=0, description="Under the root of the row's norm."),
            "head_eps": Scalar(minimum=0, description="Under the root of a head's norm."),
            "quant_scale_k": Scalar(above=0, description="Factor of keys in the cache."),
            "quant_scale_v": Scalar(above=0, description="Factor of values in the cache."),
        },
        outputs={
            "q_out": row_of(["num_tokens", "num_qo_heads", "head_dim"]),
            "residual_out": row_of(["num_tokens", "k"]),
            "normed_out": row_of(["num_tokens", "k"]),
            **caches,
        },
        constraints=["n % head_dim == 0", "n > 2 * num_kv_heads * head_dim", "len_indptr >= 1"],
        options={"is_neox": (True, False), "kv_layout": (kv_layout,)},
        hints=["enable_pdl", "weight_ready"],
        tags=["status:verified", "fused"],
        reference=_heads_reference,
        init=functools.partial(_init, kv_layout),
    )


add_rmsnorm_mm_rope_append_bf16_trace = by_layout(_template)
