"""Template and reference of the product of a norm."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Const, Scalar, Tensor, Var
from ..template import TraceTemplate


def _add_rmsnorm_mm_bf16_reference(
    input: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """s = input + residual; y = rmsnorm(s) * norm_weight, rounded; out = y @ b + bias.

    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019; BLAS Technical
    Forum, the general matrix product.
    """
    total = input.double() + residual.double()
    factor = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    normed = (total * factor * norm_weight.double()).to(input.dtype)
    product = normed.double() @ b.double()
    return product if bias is None else product + bias.double(), total, normed


def _init(arguments: dict[str, Any]) -> dict[str, Any]:
    device, generator = arguments["input"].device, torch.Generator().manual_seed(1)
    shapes = {"input": (1, 64), "residual": (1, 64), "norm_weight": (64,), "b": (64, 24)}
    return {
        name: torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for name, shape in shapes.items()
    }


def row_of(axes: list[str], description: str = "") -> Tensor:
    return Tensor(axes, dtype="bfloat16", layout="rows", description=description)


add_rmsnorm_mm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes={
        "m": Var("Rows: one."),
        "n": Const("Columns of the result.", abbrev="n"),
        "k": Const("Terms of each sum, at most 4096.", abbrev="k"),
    },
    inputs={
        "input": row_of(["m", "k"], "Row."),
        "residual": row_of(["m", "k"], "What is added to it."),
        "norm_weight": Tensor(
            ["k"], dtype="bfloat16", layout="rows", description="Weight of the norm."
        ),
        "b": row_of(["k", "n"], "Right operand."),
        "bias": Tensor(
            ["n"],
            dtype="bfloat16",
            optional=True,
            layout="rows",
            description="Added to the product.",
        ),
        "eps": Scalar("float32", minimum=0, description="Under the root."),
    },
    outputs={
        "out": row_of(["m", "n"]),
        "residual_out": row_of(["m", "k"]),
        "normed_out": row_of(["m", "k"]),
    },
    constraints=["m == 1", "0 < k <= 4096", "n > 0"],
    name_prefix="add_rmsnorm_mm_bf16",
    reference=_add_rmsnorm_mm_bf16_reference,
    init=_init,
    hints=["enable_pdl", "weight_ready"],
    description="Product of the norm of a sum of two rows.",
)
