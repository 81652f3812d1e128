"""Templates and reference of a whole decode step of a KDA layer, token by token, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .gated_delta_rule import delta_rule_recurrence
from .kda import _decay

_FLOATS = ("float32", "bfloat16", "float16")
_HALF = ("bfloat16", "float16")


def _layer(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    output_gate: torch.Tensor,
    norm_weight: torch.Tensor,
    lower_bound: float | None,
    norm_eps: float,
    query_start_loc: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and caches of both functions."""
    heads, dim = state.shape[1:3]
    slots = state_indices.reshape(len(state_indices), -1).tolist()
    bounds = list(range(len(slots) + 1)) if query_start_loc is None else query_start_loc.tolist()
    decay = _decay(raw_gate, A_log, dt_bias.reshape(heads, dim), lower_bound)[0]
    rate = torch.sigmoid(raw_beta.double())[0]
    taps = weight.double().transpose(1, 2).reshape(3 * heads * dim, -1)  # the token's own is last
    width = taps.shape[1]
    core = torch.zeros((len(x), heads, dim), dtype=torch.float64, device=x.device)
    inputs, states = conv_state.double().clone(), state.double().clone()
    for i, row in enumerate(slots):
        accepted = 1 if num_accepted_tokens is None else int(num_accepted_tokens[i])
        first = min(max(accepted - 1, 0), len(row) - 1)
        tokens = slice(bounds[i], bounds[i + 1])
        count = tokens.stop - tokens.start
        known = [0 < slot < len(state) for slot in row]
        if not (known[0] and known[first] and row[0] < len(conv_state)) or count == 0:
            continue  # padding
        history = conv_state[row[0], :, first : first + width - 1].double()
        window = torch.cat([history, x[tokens].double().T], 1)
        mixed = F.silu(torch.einsum("ctw,cw->tc", window.unfold(1, width, 1), taps))
        q, k, v = mixed.view(count, 3, heads, dim).unbind(1)
        core[tokens], of_tokens = delta_rule_recurrence(
            q, k, v, decay[tokens], rate[tokens], state[row[first]], dim**-0.5, True
        )
        inputs[row[0], :, : width - 2 + count] = window[:, 1:]
        for slot, left in zip(row, of_tokens, strict=False):
            if 0 < slot < len(state):
                states[slot] = left
    scale = torch.rsqrt(core.square().mean(-1, keepdim=True) + norm_eps)
    gate = torch.sigmoid(output_gate.double())
    return (core * scale * norm_weight.double() * gate)[None], inputs, states


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    output_gate: torch.Tensor,
    norm_weight: torch.Tensor,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v = silu(conv(x)); S = S diag(decay); S += beta (v - S k) k^T; o = S q / sqrt(dim);
    output = o / sqrt(mean(o^2) + norm_eps) norm_weight sigmoid(output_gate).

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.
    """
    return _layer(
        x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state_indices, state,
        output_gate, norm_weight, lower_bound, norm_eps, None, None,
    )  # fmt: skip


def _packed_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    output_gate: torch.Tensor,
    norm_weight: torch.Tensor,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    *,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v = silu(conv(x)); S = S diag(decay); S += beta (v - S k) k^T; o = S q / sqrt(dim);
    output = o / sqrt(mean(o^2) + norm_eps) norm_weight sigmoid(output_gate), for drafts.

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.
    """
    return _layer(
        x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state_indices, state,
        output_gate, norm_weight, lower_bound, norm_eps, query_start_loc, num_accepted_tokens,
    )  # fmt: skip


_AXES: dict[str, Axis] = {
    "num_rows": Var("Tokens."),
    "num_slots": Var("Slots of both caches."),
    "num_heads": Const("Heads.", abbrev="h"),
    "head_dim": Const("Elements of a key and of a value.", abbrev="d"),
    "length": Const("Inputs that a slot holds.", abbrev="l"),
    "qkv_elements": Const("Elements of all heads' queries, keys and values.", abbrev=""),
    "head_elements": Const("Elements of all heads.", abbrev=""),
    "width": Const("Taps.", abbrev="", value=4),
    "three": Const("Queries, keys, values.", abbrev="", value=3),
    "one": Const("Batches.", abbrev="", value=1),
}
_POOL = ["num_slots", "num_heads", "head_dim", "head_dim"]
_CACHE = ["num_slots", "qkv_elements", "length"]


def _draw(arguments: dict[str, Any], packed: bool) -> dict[str, Any]:
    """Operands of three sequences, the second padding; with drafts, of up to three tokens."""
    generator = torch.Generator().manual_seed(3)
    device, dtype = arguments["x"].device, arguments["x"].dtype
    half = dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    heads, dim, rows = 2, 32, 5 if packed else 3

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def indices(*slots: Any) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int32, device=device)

    drafts = {
        "query_start_loc": indices(0, 3, 4, 5),
        "num_accepted_tokens": indices(2, 1, 3),
        "state_indices": indices([2, 7, 6], [0, 0, 0], [1, 4, 5]),
    }
    return {
        "x": values(rows, 3 * heads * dim).to(half),
        "weight": values(3, 4, heads * dim),
        "conv_state": values(8, 3 * heads * dim, 5 if packed else 3).to(half),
        "raw_gate": values(1, rows, heads, dim).to(half),
        "raw_beta": values(1, rows, heads).to(half),
        "A_log": values(heads),
        "dt_bias": values(heads, dim),
        "state_indices": indices(2, 0, 1),
        "state": values(8, heads, dim, dim),
        "output_gate": values(rows, heads, dim).to(half),
        "norm_weight": values(dim),
        "lower_bound": -5.0,
        **(drafts if packed else {}),
    }


def _rows(*dims: str, **properties: Any) -> Tensor:
    return Tensor([*dims], dtypes=_FLOATS, **properties)


def _inputs(packed: bool) -> dict[str, Value]:
    kinds = ("int32", "int64")
    inputs: dict[str, Value] = {
        "x": Tensor(
            ["num_rows", "qkv_elements"], dtypes=_HALF, description="Queries, keys, values."
        ),
        "weight": _rows("three", "width", "head_elements", description="Taps, the newest last."),
        "conv_state": Tensor(_CACHE, dtype_from="x", description="Last inputs, the newest last."),
        "raw_gate": _rows("one", "num_rows", "num_heads", "head_dim", layout="rows"),
        "raw_beta": _rows("one", "num_rows", "num_heads", description="Logit of the rate."),
        "A_log": Tensor(["num_heads"], dtype="float32", ranks=(1, 2, 3, 4)),
        "dt_bias": _rows("head_elements", ranks=(1, 2), description="Added to the gate."),
        "state_indices": Tensor(["num_slots_given"], dtypes=kinds, ranks=(2,) if packed else (1,)),
        "state": _rows(*_POOL, description="Pool; key axis last."),
        "output_gate": _rows("num_rows", "num_heads", "head_dim"),
        "norm_weight": _rows("head_dim"),
        "lower_bound": Scalar(optional=True, below=0, description="Lowest logarithm of a decay."),
        "norm_eps": Scalar(description="Added to the mean square."),
    }
    if packed:
        inputs["query_start_loc"] = Tensor(["len_indptr"], dtypes=kinds)
        inputs["num_accepted_tokens"] = Tensor(["num_sequences"], dtype="int32")
    return inputs


_OPTIONS: dict[str, tuple[Any, ...]] = {
    "backend": ("cute-dsl", "auto"),
    "state_indices_mode": (None, "positive_unique", "unique_or_null"),
}
_RULES = [
    "head_dim in (32, 64, 128, 256)",
    "qkv_elements == 3 * num_heads * head_dim",
    "head_elements == num_heads * head_dim",
    "width == 4 and three == 3 and one == 1",
]


def _template(packed: bool) -> TraceTemplate:
    """For one token of each sequence, or (packed) for drafts."""
    axes = {**_AXES, "num_slots_given": Var("Slots of all sequences, or of their tokens.")}
    rules = [*_RULES, "length == 3", "num_slots_given == num_rows"]
    if packed:
        axes |= {"num_sequences": Var("Sequences."), "len_indptr": Var("num_sequences + 1.")}
        slots = "num_slots_given == num_sequences * (length - 2)"
        rules = [*_RULES, "len_indptr == num_sequences + 1", slots]
    return TraceTemplate(
        op_type="kda",
        name_prefix="packed_fused_kda_decode" if packed else "fused_kda_decode",
        description="Convolution, delta rule and gated norm of a KDA layer, for the next tokens.",
        axes=axes,
        inputs=_inputs(packed),
        outputs={
            "output": Tensor(
                ["one", "num_rows", "num_heads", "head_dim"], param="output", dtype_from="x"
            ),
            "conv_state": Tensor(_CACHE, param="conv_state", dtype_from="x"),
            "state": Tensor(_POOL, param="state", dtype_from="state"),
        },
        options={} if packed else _OPTIONS,
        unsupported=["t1_state_indices"] if packed else [],
        constraints=rules,
        tags=["status:verified", "stage:decode"],
        reference=_packed_reference if packed else _reference,
        init=lambda arguments: _draw(arguments, packed),
    )


fused_kda_decode_trace = _template(packed=False)
packed_fused_kda_decode_trace = _template(packed=True)
