"""Template and reference of products with weights of 4 and 8 bits."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..specs import Const, Tensor, Var
from ..template import TraceTemplate

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALF = ("bfloat16", "float16")
_FORMATS = ("int4", "int8", "mxfp4", "nvfp4")


def _codes_of(weight: torch.Tensor, weight_format: str) -> torch.Tensor:
    """[n, k] values of the codes, in float64."""
    if weight_format == "int8":
        return weight.double()
    codes = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2).long()
    if weight_format == "int4":
        return ((codes ^ 8) - 8).double()
    table = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], device=weight.device)
    return table.double()[codes]


def _scales_of(scale: torch.Tensor, weight_format: str, k: int) -> torch.Tensor:
    """[n, k] factors of the codes, in float64."""
    if weight_format == "mxfp4":
        factors = torch.exp2(scale.view(torch.uint8).double() - 127.0)
    elif weight_format == "nvfp4":
        factors = scale.view(torch.float8_e4m3fn).double()
    else:
        factors = scale.double().reshape(scale.shape[0], -1)
    return factors.repeat_interleave(-(-k // factors.shape[1]), dim=1)[:, :k]


def _weight_only_linear_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_format: str,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = alpha (input @ (codes scales)^T) + bias.

    Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification 1.0", 2023.
    """
    values = _codes_of(weight, weight_format)
    values = values * _scales_of(weight_scale, weight_format, input.shape[1])
    product = (input.double() @ values.T) * (1.0 if alpha is None else float(alpha))
    return product if bias is None else product + bias.double()


def _example(arguments: dict[str, Any], weight_format: str) -> dict[str, Any]:
    x = arguments["input"]
    generator = torch.Generator().manual_seed(1)
    n, k = 24, 256
    dtype = torch.bfloat16 if x.dtype == torch.float32 else x.dtype  # no kernel takes float32
    rows = torch.randn(5, k, generator=generator).to(x.device, dtype)
    if weight_format == "int8":
        weight = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
        scale = (torch.rand(n, generator=generator) + 0.5).to(dtype)
    else:
        weight = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
        group = {"int4": 128, "mxfp4": 32, "nvfp4": 16}[weight_format]
        scale = torch.rand(n, k // group, generator=generator) + 0.5
        if weight_format == "mxfp4":
            scale = (scale * 4.0 + 124.0).to(torch.uint8)
        else:
            scale = scale.to(dtype if weight_format == "int4" else torch.float8_e4m3fn)
    return {
        "input": rows,
        "weight": weight.to(x.device),
        "weight_scale": scale.to(x.device),
        "weight_format": weight_format,
    }


@functools.cache
def _template(weight_format: str, scale_rank: int) -> TraceTemplate:
    is_int8 = weight_format == "int8"
    integers = weight_format in ("int4", "int8")
    scales = ["n"] if scale_rank == 1 else ["n", "groups"]
    return TraceTemplate(
        f"gemm_{weight_format}",
        axes={
            "m": Var("Rows of the input."),
            "n": Const("Rows of the weight.", abbrev="n"),
            "k": Const("Terms of each sum.", abbrev="k"),
            "columns": Const(
                "Elements of a row of the weight.",
                abbrev="",
                derive=lambda sizes: sizes["k"] if is_int8 else sizes["k"] // 2,
            ),
            **({} if scale_rank == 1 else {"groups": Const("Scales of a row.", abbrev="s")}),
            "one": Const("One element.", abbrev="", value=1),
        },
        inputs={
            "input": Tensor(["m", "k"], dtypes=_HALF, layout="rows", description="Left operand."),
            "weight": Tensor(
                ["n", "columns"],
                dtype="int8" if is_int8 else "uint8",
                layout="rows",
                description="Codes.",
            ),
            "weight_scale": Tensor(
                scales,
                dtypes=(*_HALF, "float32")
                if integers
                else ("uint8", "float8_e8m0fnu" if weight_format == "mxfp4" else "float8_e4m3fn"),
                description="Factors of the codes.",
            ),
            "alpha": Tensor(
                ["one"], dtype="float32", optional=True, description="Factor of the product."
            ),
            "bias": Tensor(
                ["n"],
                dtype_from="input",
                optional=True,
                layout="rows",
                description="Added to every row.",
            ),
        },
        outputs={"out": Tensor(["m", "n"], dtype_from="input", param="out")},
        name_prefix=f"weight_only_linear_{weight_format}" + ("_by_row" if scale_rank == 1 else ""),
        reference=_weight_only_linear_reference,
        init=lambda arguments: _example(arguments, weight_format),
        hints=["enable_pdl"],
        options={"weight_format": (weight_format,)},
        description="Product of 16-bit activations with weights of 4 or 8 bits.",
    )


def weight_only_linear_trace(**arguments: Any) -> TraceTemplate:
    """The template for the weights' format."""
    weight_format = arguments.get("weight_format")
    known = weight_format if weight_format in _FORMATS else "int4"
    rank = getattr(arguments.get("weight_scale"), "ndim", 2)
    return _template(known, 1 if rank == 1 and known in ("int4", "int8") else 2)


weight_only_linear_trace.templates = [  # type: ignore[attr-defined]
    _template("int8", 1),
    *(_template(name, 2) for name in ("int4", "mxfp4", "nvfp4")),
]
