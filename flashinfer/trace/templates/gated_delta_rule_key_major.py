"""Template and reference of the gated delta rule whose states have the value axis last."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Tensor
from ..template import TraceTemplate
from .gated_delta_rule import DECODE_AXES, DECODE_INPUTS, GATES, decode, halved, tokens_of

STATES = ("float32", "bfloat16", "float16")


def _key_major_reference(
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
    """S = decay S; S += beta (v - S k) k^T; output = scale S q, with S^T in memory.

    Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024.
    """
    gates = (A_log, a, dt_bias, b)
    pool = state.transpose(2, 3)
    out, pool = decode(q, k, v, pool, gates, scale, use_qk_l2norm, None, None, False)
    return out, pool.transpose(2, 3)


def _key_major(**properties: Any) -> Tensor:
    return Tensor(["batch_size", "num_v_heads", "head_dim_k", "head_dim_v"], **properties)


gated_delta_rule_decode_trace = TraceTemplate(
    op_type="gdn",
    name_prefix="gated_delta_rule_decode_key_major",
    description="Gated delta rule for the next tokens of each sequence, state in place.",
    axes={k: v for k, v in DECODE_AXES.items() if k != "num_slots"},
    inputs={
        **DECODE_INPUTS,
        "state": _key_major(dtypes=STATES, description="Value axis last."),
        **GATES,
    },
    outputs={
        "output": tokens_of("num_v_heads", "head_dim_v", param="output", dtype_from="q"),
        "state": _key_major(param="state", dtype_from="state", returned=True),
    },
    options={"use_qk_l2norm": (True, False), "backend": ("auto", "flashinfer")},
    tags=["status:verified", "stage:decode"],
    reference=_key_major_reference,
    init=halved,
)
