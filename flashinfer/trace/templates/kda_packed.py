"""Template and reference of Kimi Delta Attention's decode from packed operands, in float64."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Const, Tensor, Var
from ..template import TraceTemplate
from .gated_delta_rule import delta_rule_recurrence
from .kda import _decay

_FLOATS = ("float32", "bfloat16", "float16")
_HALF = ("bfloat16", "float16")


def _reference(
    mixed_qkv: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S = S diag(exp(-5 sigmoid(exp(A_log) (raw_gate + dt_bias)))); S += sigmoid(raw_beta)
    (v - S k) k^T; output = S q / sqrt(head_dim), with q and k of length one.

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.
    """
    heads, dim = state.shape[1:3]
    q, k, v = mixed_qkv.unflatten(1, (3, 1, heads, dim)).unbind(1)
    gate = raw_gate.unflatten(1, (1, heads, dim))
    decay = _decay(gate, A_log, dt_bias.reshape(heads, dim), -5.0)
    rate = torch.sigmoid(raw_beta.double())[:, None]
    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    pool = state.double().clone()
    for i, slot in enumerate(state_indices.tolist()):
        if 0 <= slot < len(state):  # else padding
            out[i], states = delta_rule_recurrence(
                q[i], k[i], v[i], decay[i], rate[i], state[slot], dim**-0.5, True
            )
            pool[slot] = states[-1]
    return out, pool


def _draw(arguments: dict[str, Any]) -> dict[str, Any]:
    """Operands of three requests, the second padding, over a pool of four states."""
    generator = torch.Generator().manual_seed(3)
    device, dtype = arguments["mixed_qkv"].device, arguments["mixed_qkv"].dtype
    half = dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    heads, dim = 2, 32

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    return {
        "mixed_qkv": values(3, 3 * heads * dim).to(half),
        "raw_gate": values(3, heads * dim).to(half),
        "raw_beta": values(3, heads).to(half),
        "A_log": values(heads),
        "dt_bias": values(heads, dim),
        "state": values(4, heads, dim, dim),
        "state_indices": torch.tensor([2, -1, 0], dtype=torch.int32, device=device),
    }


_STATE = ["num_slots", "num_heads", "head_dim", "head_dim"]

packed_kda_decode_trace = TraceTemplate(
    op_type="kda",
    name_prefix="packed_kda_decode",
    description="Delta rule with a decay per key channel, for one token of each sequence.",
    axes={
        "batch_size": Var("Sequences."),
        "num_slots": Var("States of the pool."),
        "num_heads": Const("Heads.", abbrev="h"),
        "head_dim": Const("Elements of a key and of a value.", abbrev="d"),
        "qkv_elements": Const("Elements of all heads' queries, keys and values.", abbrev=""),
        "gate_elements": Const("Elements of all heads' keys.", abbrev=""),
        "one": Const("Tokens of a sequence.", abbrev="", value=1),
    },
    inputs={
        "mixed_qkv": Tensor(
            ["batch_size", "qkv_elements"],
            dtypes=_HALF,
            layout="rows",
            description="Queries of all heads, then keys, then values.",
        ),
        "raw_gate": Tensor(
            ["batch_size", "gate_elements"], dtypes=_FLOATS, layout="rows", description="Gate."
        ),
        "raw_beta": Tensor(
            ["batch_size", "num_heads"], dtypes=_FLOATS, description="Logit of the learning rate."
        ),
        "A_log": Tensor(["num_heads"], dtype="float32", description="Decay's rate."),
        "dt_bias": Tensor(
            ["gate_elements"], dtypes=_FLOATS, ranks=(1, 2), description="Added to the gate."
        ),
        "state": Tensor(_STATE, dtypes=_FLOATS, description="Pool; key axis last."),
        "state_indices": Tensor(
            ["batch_size"],
            dtypes=("int32", "int64"),
            description="Slot of each sequence; negative: padding.",
        ),
    },
    outputs={
        "output": Tensor(
            ["batch_size", "one", "num_heads", "head_dim"],
            param="output",
            dtype_from="mixed_qkv",
            layout="rows",
        ),
        "state": Tensor(_STATE, param="state", dtype_from="state"),
    },
    constraints=[
        "head_dim in (32, 64, 128, 256)",
        "qkv_elements == 3 * num_heads * head_dim",
        "gate_elements == num_heads * head_dim",
    ],
    tags=["status:verified", "stage:decode"],
    reference=_reference,
    init=_draw,
)
