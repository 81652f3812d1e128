"""Template and reference of the product of a norm that chooses experts."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Const, Scalar, Tensor, Var
from ..template import TraceTemplate
from .normed_product import _add_rmsnorm_mm_bf16_reference, row_of


def _route_reference(
    input: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    b: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, ...]:
    """logits = rmsnorm(input + residual) @ b + bias, rounded; weight = softmax(logits)[expert].

    The experts are those with the largest logits.

    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019; N. Shazeer et al.,
    "Outrageously Large Neural Networks", 2017.
    """
    product, total, normed = _add_rmsnorm_mm_bf16_reference(
        input, residual, norm_weight, b, bias, eps
    )
    logits = product.to(input.dtype)
    shares = logits.double().softmax(-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    chosen = order[:, :top_k].clone(memory_format=torch.contiguous_format)
    weights = shares.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routed_scaling_factor, chosen.to(torch.int32), product, total, normed


def _init(arguments: dict[str, Any]) -> dict[str, Any]:
    device, generator = arguments["input"].device, torch.Generator().manual_seed(4)
    shapes = {"input": (1, 64), "residual": (1, 64), "norm_weight": (64,), "b": (64, 24)}
    values = {
        name: torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for name, shape in shapes.items()
    }
    return {**values, "b": values["b"] / 8, "top_k": 4, "routed_scaling_factor": 1.0}


add_rmsnorm_mm_route_bf16_trace = TraceTemplate(
    "moe_routing",
    axes={
        "num_tokens": Var("Tokens: one."),
        "num_experts": Const("Experts, at most 128.", abbrev="e"),
        "k": Const("Terms of each sum, at most 4096.", abbrev="k"),
        "top_k": Const("Experts of a token.", abbrev="topk"),
    },
    inputs={
        "input": row_of(["num_tokens", "k"], "Row."),
        "residual": row_of(["num_tokens", "k"], "What is added to it."),
        "norm_weight": Tensor(["k"], dtype="bfloat16", description="Weight of the norm."),
        "b": row_of(["k", "num_experts"], "Weights of the router."),
        "bias": Tensor(
            ["num_experts"], dtype="bfloat16", optional=True, description="Added to the logits."
        ),
        "eps": Scalar("float32", minimum=0, description="Under the root."),
        "routed_scaling_factor": Scalar(above=0, description="Factor of the weights."),
    },
    outputs={
        "topk_values": Tensor(["num_tokens", "top_k"], dtype="float32"),
        "topk_indices": Tensor(["num_tokens", "top_k"], dtype="int32"),
        "logits": row_of(["num_tokens", "num_experts"]),
        "residual_out": row_of(["num_tokens", "k"]),
        "normed_out": row_of(["num_tokens", "k"]),
    },
    options={"renormalize": (True, False)},
    name_prefix="add_rmsnorm_mm_route_bf16",
    reference=_route_reference,
    init=_init,
    hints=["enable_pdl", "weight_ready"],
    description="Product of the norm of a sum of two rows, and the choice of experts by it.",
)
