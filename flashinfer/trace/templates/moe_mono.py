"""Template and reference of `mono_moe`: routing and a mixture with weights of 8 bits."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import FLOATING, Const, Scalar, Tensor, Var
from ..template import TraceTemplate
from .moe import _check, _cutlass_fused_moe_block_reference


def _gates_last(x: torch.Tensor) -> torch.Tensor:
    """Halves of the rows in the other order."""
    return torch.cat(x.chunk(2, dim=1)[::-1], dim=1)


def _mono_moe_reference(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
) -> torch.Tensor:
    """out[t] = sum_j score[t, j] down[e] (silu(gate[e] x[t]) (up[e] x[t])), e the j-th best expert.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """
    logits = router_logits.float()
    scores = torch.softmax(logits, -1) if scoring_func == "softmax" else torch.sigmoid(logits)
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, chosen).double()
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return _cutlass_fused_moe_block_reference(
        activations_in,
        chosen,
        weights,
        _gates_last(expert_weights_up.float()),
        expert_weights_down,
        torch.bfloat16,
        [_gates_last(expert_scales_up), expert_scales_down],
    )


def _init(arguments: dict[str, Any]) -> dict[str, Any]:
    """Logits that no rounding orders in another way."""
    device = arguments["activations_in"].device
    generator = torch.Generator().manual_seed(5)
    tokens, experts, hidden, intermediate = 5, 6, 256, 128

    def weight(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(experts, rows, columns, generator=generator) * 16 / columns**0.5
        return values.to(device, torch.float8_e4m3fn)

    def scale(rows: int, columns: int) -> torch.Tensor:
        values = torch.rand(experts, rows // 128, columns // 128, generator=generator) + 0.5
        return (values / 16).to(device)

    rows = [torch.randperm(experts, generator=generator) for _ in range(tokens)]
    x = torch.randn(tokens, hidden, generator=generator)
    return {
        **arguments,
        "activations_in": x.to(device, torch.bfloat16),
        "router_logits": (torch.stack(rows) - 2).to(device, torch.bfloat16),
        "expert_weights_up": weight(2 * intermediate, hidden),
        "expert_scales_up": scale(2 * intermediate, hidden),
        "expert_weights_down": weight(hidden, intermediate),
        "expert_scales_down": scale(hidden, intermediate),
        "scratchpad": None,
        "top_k": 2,
    }


mono_moe_trace = TraceTemplate(
    "mono_moe",
    axes={
        "tokens": Var("Tokens."),
        "experts": Const("Experts.", abbrev="e"),
        "hidden": Const("Elements of a token.", abbrev="h"),
        "intermediate": Const("Elements of a row between the products.", abbrev="i"),
        "columns": Const("Columns of the first product: gates, then values.", abbrev=""),
        "hidden_blocks": Const("Blocks of 128 elements of a token.", abbrev=""),
        "blocks": Const("Blocks of 128 elements of a row between the products.", abbrev=""),
        "column_blocks": Const("Blocks of 128 columns of the first product.", abbrev=""),
        "bytes": Var("Bytes of the scratchpad."),
    },
    inputs={
        "activations_in": Tensor(
            ["tokens", "hidden"], dtype="bfloat16", layout="rows", description="Tokens."
        ),
        "router_logits": Tensor(["tokens", "experts"], dtypes=FLOATING, layout="rows"),
        "expert_weights_up": Tensor(
            ["experts", "columns", "hidden"],
            dtype="float8_e4m3fn",
            description="Rows of gates, then rows of values.",
        ),
        "expert_scales_up": Tensor(
            ["experts", "column_blocks", "hidden_blocks"],
            dtype="float32",
            description="Factors of 128 by 128 elements.",
        ),
        "expert_weights_down": Tensor(["experts", "hidden", "intermediate"], dtype="float8_e4m3fn"),
        "expert_scales_down": Tensor(
            ["experts", "hidden_blocks", "blocks"],
            dtype="float32",
            description="Factors of 128 by 128 elements.",
        ),
        "top_k": Scalar("int32", minimum=1, description="Experts of a token."),
        "scratchpad": Tensor(
            ["bytes"], dtype="uint8", layout="contiguous", optional=True, description="Memory."
        ),
    },
    outputs={"out": Tensor(["tokens", "hidden"], dtype="bfloat16", param="out")},
    name_prefix="mono_moe",
    reference=_mono_moe_reference,
    check=_check,
    init=_init,
    scratch=("scratchpad",),
    constraints=[
        "columns == 2 * intermediate",
        "hidden_blocks * 128 == hidden",
        "blocks * 128 == intermediate",
        "column_blocks * 128 == columns",
        "experts <= 1024",
        "top_k <= experts",
        "top_k <= 32",
    ],
    options={
        "scoring_func": ("softmax", "sigmoid"),
        "renormalize": (True, False),
        "interleave_up": (True, False),
    },
    description="The best experts by their scores, and a mixture of them with SwiGLU.",
)
