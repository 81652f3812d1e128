"""Templates and references of 8-bit products with one scale, or one per row and per column."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Const, Tensor, Var
from ..template import TraceTemplate

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_HALF = ("bfloat16", "float16")
_AXES: dict[str, Var | Const] = {
    "m": Var("Rows of the left operand."),
    "n": Const("Columns of the result.", abbrev="n"),
    "k": Const("Terms of each sum.", abbrev="k"),
}


def _mm_fp8_reference(
    a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None = None
) -> torch.Tensor:
    """out = alpha (a @ b). Source: BLAS Technical Forum, the general matrix product."""
    return (a.double() @ b.double()) * (1.0 if alpha is None else float(alpha))


def _fp8_linear_reference(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    output_quant_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = a_scale weight_scale (a @ weight^T) + bias, times the output's scale.

    An 8-bit result is bounded by 448, the largest e4m3. Source: as mm_fp8.
    """
    scales = a_scale.double().reshape(-1, 1) * weight_scale.double().reshape(1, -1)
    product = (a.double() @ weight.double().T) * scales
    if bias is not None:
        product = product + bias.double()
    if output_quant_scale is not None:
        product = (product * float(output_quant_scale)).clamp(-448.0, 448.0)
    return product


def _grouped_mm_fp8_reference(
    a: torch.Tensor, b: torch.Tensor, m_indptr: torch.Tensor, alpha: torch.Tensor | None = None
) -> torch.Tensor:
    """out[r] = alpha (a[r] @ b[g]^T) for the rows r of each group g. Source: as mm_fp8."""
    bounds = m_indptr.tolist()
    out = a.new_full((a.shape[0], b.shape[1]), float("nan"), dtype=torch.float64)
    for g, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        out[begin:end] = a[begin:end].double() @ b[g].double().T
    return out * (1.0 if alpha is None else float(alpha))


def _codes(device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).to(device, torch.float8_e4m3fn) for s in shapes]


def _mm_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device = arguments["a"].device
    a, b = _codes(device, (5, 64), (32, 64))
    alpha = torch.tensor([0.5], device=device)
    return {"a": a, "b": b.T, "alpha": alpha, "backend": "cublas"}


def _linear_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device = arguments["a"].device
    a, weight = _codes(device, (5, 128), (40, 128))
    scales = [torch.linspace(0.5, 2.0, rows, device=device) for rows in (5, 40)]
    return {"a": a, "weight": weight, "a_scale": scales[0], "weight_scale": scales[1]}


def _grouped_init(arguments: dict[str, Any]) -> dict[str, Any]:
    device = arguments["a"].device
    a, b = _codes(device, (50, 64), (3, 40, 64))
    bounds = torch.tensor([0, 5, 5, 50], dtype=torch.int32, device=device)
    return {"a": a, "b": b, "m_indptr": bounds, "alpha": torch.tensor([0.5], device=device)}


_ALPHA = Tensor(["one"], dtype="float32", optional=True, description="Factor of the result.")
_ONE = Const("One element.", abbrev="", value=1)

mm_fp8_trace = TraceTemplate(
    "gemm_fp8",
    axes={**_AXES, "one": _ONE},
    inputs={
        "a": Tensor(["m", "k"], dtype="float8_e4m3fn", layout="rows", description="Left operand."),
        "b": Tensor(["k", "n"], dtype="float8_e4m3fn", description="Right one, column-major."),
        "alpha": _ALPHA,
    },
    outputs={"out": Tensor(["m", "n"], dtype_from_scalar="out_dtype", dtypes=_HALF)},
    name_prefix="mm_fp8",
    reference=_mm_fp8_reference,
    init=_mm_init,
    options={"backend": ("cublas", "cudnn", "auto")},
    description="Product of two 8-bit matrices, multiplied by one number.",
)

fp8_linear_trace = TraceTemplate(
    "gemm_fp8",
    axes={**_AXES, "one": _ONE},
    inputs={
        "a": Tensor(["m", "k"], dtypes=_FP8, layout="rows", description="Left operand."),
        "weight": Tensor(["n", "k"], dtypes=_FP8, layout="rows", description="Weight."),
        "a_scale": Tensor(["m"], dtype="float32", description="Factors of the rows of a."),
        "weight_scale": Tensor(["n"], dtype="float32", description="Factors of the weight's rows."),
        "bias": Tensor(
            ["n"], dtypes=(*_HALF, "float32"), optional=True, description="Added to every row."
        ),
        "output_quant_scale": Tensor(
            ["one"], dtype="float32", optional=True, description="Factor of an 8-bit result."
        ),
    },
    outputs={
        "out": Tensor(
            ["m", "n"],
            dtype_from_scalar="out_dtype",
            dtypes=(*_HALF, "float32", "float8_e4m3fn"),
        )
    },
    name_prefix="fp8_linear",
    reference=_fp8_linear_reference,
    init=_linear_init,
    options={"qkv_scale": (None,), "config": (None,)},
    description="Product of 8-bit matrices with a scale per token and per channel.",
)

grouped_mm_fp8_trace = TraceTemplate(
    "gemm_fp8",
    axes={
        **_AXES,
        "groups": Const("Matrices of the right operand.", abbrev="g"),
        "bounds": Const("Groups and one.", abbrev="", derive=lambda sizes: sizes["groups"] + 1),
        "one": _ONE,
    },
    inputs={
        "a": Tensor(["m", "k"], dtypes=_FP8, layout="rows", description="Left operand."),
        "b": Tensor(["groups", "n", "k"], dtypes=_FP8, layout="rows", description="Right ones."),
        "m_indptr": Tensor(
            ["bounds"],
            dtypes=("int32", "int64"),
            layout="rows",
            description="First row of each group, and the end of the last.",
        ),
        "alpha": _ALPHA,
    },
    outputs={
        "out": Tensor(
            ["m", "n"],
            dtype_from_scalar="out_dtype",
            dtypes=(*_HALF, "float32"),
            layout="rows",
            param="out",
        )
    },
    constraints=["bounds == groups + 1"],
    name_prefix="grouped_mm_fp8",
    reference=_grouped_mm_fp8_reference,
    init=_grouped_init,
    options={"backend": ("cudnn", "auto"), "tactic": (-1,)},
    description="Products of groups of rows with a matrix each, 8 bits.",
)
