"""Template and reference of a whole decode step of a gated delta rule layer, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..specs import Const, Scalar, Tensor, Var
from ..template import TraceTemplate
from .gated_delta_rule import _softplus_decay, delta_rule_recurrence

_FLOATS = ("float32", "bfloat16", "float16")
_HALF = ("bfloat16", "float16")


def _reference(
    hidden_states: torch.Tensor,
    w_ba: torch.Tensor,
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    conv_state: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float | None,
    ssm_state: torch.Tensor,
    state_indices: torch.Tensor,
    use_qk_l2norm: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """b, a = hidden_states w_ba; q, k, v = silu(conv(mixed_qkv) + conv_bias); S = decay S;
    S += sigmoid(b) (v - S k) k^T; out = scale S q.

    Source: S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", 2024.
    """
    heads, dim = ssm_state.shape[1:3]
    keys = (mixed_qkv.shape[1] // dim - heads) // 2
    b, a = (hidden_states.double() @ w_ba.double()).split(heads, dim=1)
    decay, rate = _softplus_decay(A_log, a, dt_bias), torch.sigmoid(b)
    factor = dim**-0.5 if scale is None else scale
    out = torch.zeros((len(mixed_qkv), heads, dim), dtype=torch.float64, device=mixed_qkv.device)
    inputs, states = conv_state.double().clone(), ssm_state.double().clone()
    for i, slot in enumerate(state_indices.tolist()):
        if not 0 <= slot < min(len(conv_state), len(ssm_state)):
            continue  # padding
        window = torch.cat([conv_state[slot].double(), mixed_qkv[i].double()[:, None]], 1)
        mixed = F.silu((window * conv_weight.double()).sum(1) + conv_bias.double())
        q, k, v = mixed.view(1, -1, dim).split([keys, keys, heads], dim=1)
        out[i : i + 1], (states[slot],) = delta_rule_recurrence(
            q, k, v, decay[i : i + 1], rate[i : i + 1], ssm_state[slot], factor, use_qk_l2norm
        )
        inputs[slot] = window[:, 1:]
    return out[:, None], inputs, states


def _draw(arguments: dict[str, Any]) -> dict[str, Any]:
    """Three sequences, the second padding, over pools of four slots."""
    generator = torch.Generator().manual_seed(3)
    device, dtype = arguments["mixed_qkv"].device, arguments["mixed_qkv"].dtype
    half = dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    heads, dim, hidden = 4, 32, 24
    channels = (2 * 2 + heads) * dim

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    return {
        "hidden_states": values(3, hidden).to(half),
        "w_ba": values(hidden, 2 * heads).to(half),
        "mixed_qkv": values(3, channels).to(half),
        "conv_weight": values(channels, 4).to(half),
        "conv_bias": values(channels).to(half),
        "conv_state": values(4, channels, 3).to(half),
        "A_log": values(heads),
        "dt_bias": values(heads),
        "scale": None,
        "ssm_state": values(4, heads, dim, dim),
        "state_indices": torch.tensor([2, -1, 0], dtype=torch.int32, device=device),
    }


_POOL = ["num_slots", "num_v_heads", "head_dim", "head_dim"]
_CACHE = ["num_slots", "qkv_dim", "history"]

gdn_fused_decode_step_trace = TraceTemplate(
    op_type="gdn",
    name_prefix="gdn_fused_decode_step",
    description="Projection of gates, convolution and gated delta rule, for one token of each.",
    axes={
        "batch_size": Var("Sequences."),
        "num_slots": Var("Slots of both pools."),
        "hidden_size": Const("Columns of the layer's input.", abbrev=""),
        "num_gates": Const("2 num_v_heads.", abbrev=""),
        "num_v_heads": Const("Heads of v and of the state.", abbrev="hv"),
        "head_dim": Const("Elements of a key and of a value.", abbrev="d"),
        "qkv_dim": Const("Elements of all heads' queries, keys and values.", abbrev="qkv"),
        "width": Const("Taps.", abbrev="w"),
        "history": Const("width - 1.", abbrev=""),
        "one": Const("Tokens of a sequence.", abbrev="", value=1),
    },
    inputs={
        "hidden_states": Tensor(["batch_size", "hidden_size"], dtype_from="mixed_qkv"),
        "w_ba": Tensor(["hidden_size", "num_gates"], dtype_from="mixed_qkv", description="b, a."),
        "mixed_qkv": Tensor(["batch_size", "qkv_dim"], dtypes=_HALF, description="q, k, v."),
        "conv_weight": Tensor(["qkv_dim", "width"], dtypes=_FLOATS, description="Newest last."),
        "conv_bias": Tensor(["qkv_dim"], dtypes=_FLOATS),
        "conv_state": Tensor(_CACHE, dtype_from="mixed_qkv", description="Last inputs."),
        "A_log": Tensor(["num_v_heads"], dtype="float32", description="Decay's rate."),
        "dt_bias": Tensor(["num_v_heads"], dtypes=_FLOATS, description="Added to a."),
        "scale": Scalar(optional=True, description="Factor of the output; 1 / sqrt(head_dim)."),
        "ssm_state": Tensor(_POOL, dtypes=_FLOATS, description="Pool; key axis last."),
        "state_indices": Tensor(
            ["batch_size"], dtypes=("int32", "int64"), description="Slots; negative: padding."
        ),
    },
    outputs={
        "out": Tensor(
            ["batch_size", "one", "num_v_heads", "head_dim"], param="out", dtype_from="mixed_qkv"
        ),
        "conv_state": Tensor(_CACHE, param="conv_state", dtype_from="mixed_qkv", returned=True),
        "ssm_state": Tensor(_POOL, param="ssm_state", dtype_from="ssm_state", returned=True),
    },
    options={"use_qk_l2norm": (True, False)},
    constraints=[
        "head_dim in (32, 64, 128, 256)",
        "num_gates == 2 * num_v_heads",
        "history == width - 1",
        "qkv_dim > num_v_heads * head_dim",
        "(qkv_dim - num_v_heads * head_dim) % (2 * head_dim) == 0",
    ],
    tags=["status:verified", "stage:decode"],
    reference=_reference,
    init=_draw,
)
