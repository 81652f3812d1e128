"""Templates and references of the products of few rows, with what follows them."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Const, Scalar, Tensor, Var
from ..template import TraceTemplate
from .normed_product import row_of


def _mm_silu_and_mul_bf16_reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """gate, up = the halves of a @ b; out = silu(gate) * up.

    Source: N. Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    gate, up = (a.double() @ b.double()).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def _mm_add_rmsnorm_bf16_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = a @ b + residual; out = rmsnorm(s) * norm_weight.

    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    total = a.double() @ b.double() + residual.double()
    factor = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return total * factor * norm_weight.double(), total


def _tensors(arguments: dict[str, Any], **shapes: tuple[int, ...]) -> dict[str, Any]:
    device, generator = arguments["a"].device, torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for name, shape in shapes.items()
    }


mm_silu_and_mul_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes={
        "m": Var("Rows: at most 8."),
        "gate_and_up": Const("Columns of the weights.", abbrev=""),
        "n": Const(
            "Columns of the result.", abbrev="n", derive=lambda axes: axes["gate_and_up"] // 2
        ),
        "k": Const("Terms of each sum.", abbrev="k"),
    },
    inputs={
        "a": row_of(["m", "k"], "Rows."),
        "b": row_of(["k", "gate_and_up"], "Gate and values."),
    },
    outputs={"out": row_of(["m", "n"])},
    constraints=["gate_and_up == 2 * n", "1 <= m <= 8", "gate_and_up > 0"],
    name_prefix="mm_silu_and_mul_bf16",
    reference=_mm_silu_and_mul_bf16_reference,
    init=lambda arguments: _tensors(arguments, a=(3, 64), b=(64, 256)),
    hints=["enable_pdl", "weight_ready"],
    description="Gated activation of the product of few rows.",
)

mm_add_rmsnorm_bf16_trace = TraceTemplate(
    "gemm_bf16",
    axes={
        "m": Var("Rows: at most 8."),
        "n": Const("Columns of the result, at most 4096.", abbrev="n"),
        "k": Const("Terms of each sum.", abbrev="k"),
    },
    inputs={
        "a": row_of(["m", "k"], "Rows."),
        "b": row_of(["k", "n"], "Right operand."),
        "residual": row_of(["m", "n"], "What the product is added to."),
        "norm_weight": Tensor(
            ["n"], dtype="bfloat16", layout="rows", description="Weight of the norm."
        ),
        "eps": Scalar("float32", minimum=0, description="Under the root."),
    },
    outputs={
        "out": row_of(["m", "n"]),
        "residual_out": Tensor(["m", "n"], param="residual", dtype_from="residual", layout="rows"),
    },
    constraints=["1 <= m <= 8", "0 < n <= 4096"],
    name_prefix="mm_add_rmsnorm_bf16",
    reference=_mm_add_rmsnorm_bf16_reference,
    init=lambda arguments: _tensors(
        arguments, a=(3, 64), b=(64, 256), residual=(3, 256), norm_weight=(256,)
    ),
    hints=["enable_pdl", "weight_ready"],
    description="Product of few rows, added to a residual, and the norm of the sum.",
)
