"""Templates and references of the merges of attention states.

A state is an attention output v over some keys, and s, the base-2 logarithm of the sum of the
exponentials of their logits. The references compute in float64 and return unrounded results.
"""

from __future__ import annotations

from typing import Any

import torch

from ..specs import FLOATING, Axis, Const, Tensor, Value, Var
from ..template import TraceTemplate


def _merge(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge v[tokens, states, heads, dim]; a state with s = -inf is not used at all."""
    v, s = v.double(), s.double()
    if v.shape[1] == 0:
        return v.sum(1), s.sum(1) - float("inf")
    top = s.amax(1, keepdim=True)
    empty = s == float("-inf")
    weight = torch.exp2(s - top.where(~top.isneginf(), 0.0)).masked_fill(empty, 0.0)
    total = weight.sum(1)
    merged = (weight[..., None] * v.masked_fill(empty[..., None], 0.0)).sum(1)
    merged = merged / total.where(total != 0, 1.0)[..., None]
    return merged, total.log2() + top.squeeze(1).where(total != 0, 0.0)


def _merge_state_reference(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = log2(2^s_a + 2^s_b), v = 2^(s_a - s) v_a + 2^(s_b - s) v_b.

    Source: Z. Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch
    Decoding", 2024.
    """
    return _merge(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))


def _merge_state_in_place_reference(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(v, s) = merge_state(v, s, v_other, s_other) for the tokens whose mask is not zero.

    Source: as merge_state.
    """
    merged_v, merged_s = _merge(torch.stack([v, v_other], 1), torch.stack([s, s_other], 1))
    if mask is None:
        return merged_v, merged_s
    keep = mask.bool()[:, None]
    return merged_v.where(keep[..., None], v.double()), merged_s.where(keep, s.double())


def _merge_states_reference(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """s = log2(sum_i 2^s_i), v = sum_i 2^(s_i - s) v_i; 0 and -inf where there is no key.

    Source: as merge_state.
    """
    return _merge(v, s)


def _axes(*, states: bool) -> dict[str, Axis]:
    axes: dict[str, Axis] = {"num_tokens": Var("Queries.")}
    if states:
        axes["num_states"] = Var("States that are merged into one.")
    axes["num_heads"] = Const("Heads of the queries.", abbrev="h")
    axes["head_dim"] = Const("Elements of a head.", abbrev="d")
    return axes


_V = ["num_tokens", "num_heads", "head_dim"]
_S = ["num_tokens", "num_heads"]
_LSE = "Base-2 logarithm of the sum of exponentials; -inf: no keys."


def _v(**properties: Any) -> Tensor:
    return Tensor(_V, layout="rows", **properties)


def _s(**properties: Any) -> Tensor:
    return Tensor(_S, dtype="float32", description=_LSE, **properties)


def _outputs(of: str, v: str | None = None, s: str | None = None) -> dict[str, Value]:
    return {"v_out": _v(param=v, dtype_from=of), "s_out": _s(param=s)}


merge_state_trace = TraceTemplate(
    op_type="cascade",
    name_prefix="merge_state",
    description="Attention over the union of two disjoint sets of keys, from that over each.",
    axes=_axes(states=False),
    inputs={
        "v_a": _v(dtypes=FLOATING),
        "s_a": _s(converts=True),
        "v_b": _v(dtype_from="v_a"),
        "s_b": _s(converts=True),
    },
    outputs=_outputs("v_a"),
    constraints=["head_dim >= 1"],
    tags=["status:verified"],
    reference=_merge_state_reference,
)

merge_state_in_place_trace = TraceTemplate(
    op_type="cascade",
    name_prefix="merge_state_in_place",
    description="merge_state over the first state, for some or all tokens.",
    axes=_axes(states=False),
    inputs={
        "v": _v(dtypes=FLOATING),
        "s": _s(converts=True),
        "v_other": _v(dtype_from="v"),
        "s_other": _s(converts=True),
        "mask": Tensor(
            ["num_tokens"],
            dtypes=("bool", "uint8"),
            optional=True,
            description="Tokens that are merged; 0: left as they are.",
        ),
    },
    outputs=_outputs("v", "v", "s"),
    constraints=["head_dim >= 1"],
    tags=["status:verified"],
    reference=_merge_state_in_place_reference,
)

merge_states_trace = TraceTemplate(
    op_type="cascade",
    name_prefix="merge_states",
    description="Attention over the union of disjoint sets of keys, from that over each.",
    axes=_axes(states=True),
    inputs={
        "v": Tensor(
            ["num_tokens", "num_states", "num_heads", "head_dim"], dtypes=FLOATING, layout="rows"
        ),
        "s": Tensor(
            ["num_tokens", "num_states", "num_heads"],
            dtype="float32",
            description=_LSE,
            converts=True,
        ),
    },
    outputs=_outputs("v"),
    constraints=["head_dim >= 1"],
    tags=["status:verified"],
    reference=_merge_states_reference,
)
