"""Template and reference of the gated delta rule for states with contiguous value channels."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Tensor
from ..template import TraceTemplate
from .gated_delta_rule import DECODE_AXES, DECODE_INPUTS, GATES, decode, halved, tokens_of


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm: bool = True,
) -> Any:
    """S = decay S; S += beta k (v - S^T k)^T; output = scale S^T q, per token and head.

    decay = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b).
    Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024.
    """
    out, pool = decode(
        q, k, v, state.transpose(-1, -2), (A_log, a, dt_bias, b), scale, use_qk_l2norm, None, None,
        False,
    )  # fmt: skip
    return out, pool.transpose(-1, -2)


def _states(**properties: Any) -> Tensor:
    return Tensor(["batch_size", "num_v_heads", "head_dim_k", "head_dim_v"], **properties)


gated_delta_rule_decode_trace = TraceTemplate(
    op_type="gated_delta_rule",
    name_prefix="gated_delta_rule_decode_key_major",
    description="Gated delta rule for the next tokens of each sequence, state in place.",
    axes={name: axis for name, axis in DECODE_AXES.items() if name != "num_slots"},
    inputs={
        **DECODE_INPUTS,
        "state": _states(dtypes=("float32", "bfloat16", "float16"), description="Value axis last."),
        **GATES,
    },
    outputs={
        "output": tokens_of("num_v_heads", "head_dim_v", param="output", dtype_from="q"),
        "state": _states(param="state", dtype_from="state", returned=True),
    },
    options={"use_qk_l2norm": (True, False), "backend": ("auto", "flashinfer")},
    tags=["status:verified", "stage:decode"],
    reference=_reference,
    init=halved,
)
