"""Template and reference of Mamba-2 with rings of tokens that are replayed, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..specs import Axis, Const, Tensor, Value, Var
from ..template import TraceTemplate

_FLOATS = ("bfloat16", "float16", "float32")
_INTS = ("int32", "int64")


def _checkpointing_ssu_reference(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> Any:
    """S = exp(A dt) S + (dt x) B; out = (S C + D x) silu(z), first over the tokens of the ring.

    Source: T. Dao, A. Gu, "Transformers are SSMs", 2024.
    """
    packed, rows = cu_seqlens is not None, x_cache.shape[2]
    bounds = [int(i) for i in cu_seqlens] if cu_seqlens is not None else []
    window = rows - (max_seqlen if max_seqlen is not None else x.shape[1])
    steps = dt.double() + (0.0 if dt_bias is None else dt_bias.double())
    steps = (F.softplus(steps) if dt_softplus else steps)[..., 0]
    pool, rate = state.double().clone(), A[:, 0, 0].double()
    scales = None if state_scale is None else state_scale.double().clone()
    rings = [ring.clone() for ring in (x_cache, B_cache, dt_cache)]
    group = torch.arange(state.shape[1], device=x.device) * B.shape[2] // state.shape[1]
    y = torch.zeros_like(x, dtype=torch.float64)

    def after(s: torch.Tensor, d: torch.Tensor, xs: torch.Tensor, Bs: torch.Tensor) -> torch.Tensor:
        """The state after a token, for all heads."""
        grown = (d[:, None] * xs.double())[..., None] * Bs.double()[group][:, None, :]
        return s * torch.exp(rate * d)[:, None, None] + grown

    for i in range(len(bounds) - 1 if packed else x.shape[0]):
        slot = i if state_batch_indices is None else int(state_batch_indices[i])
        if slot == pad_slot_id and state_batch_indices is not None or not 0 <= slot < len(pool):
            continue
        row, begin = (0, bounds[i]) if packed else (i, 0)
        end = bounds[i + 1] if packed else x.shape[1]
        start, count = int(ring_start[slot]), int(prev_num_accepted_tokens[slot])
        s = pool[slot] if scales is None else pool[slot] * scales[slot][..., None]
        for j in range(count):
            at = (start + j) % rows
            s = after(s, dt_cache[slot, :, at].double(), x_cache[slot, :, at], B_cache[slot, :, at])
        if count > 0 and count + end - begin > window:
            pool[slot] = s
            if scales is not None:
                largest = 448.0 if state.dtype.is_floating_point else torch.iinfo(state.dtype).max
                scales[slot] = s.abs().amax(-1) / largest
                codes = s / torch.where(scales[slot] > 0, scales[slot], 1.0)[..., None]
                pool[slot] = codes if state.dtype.is_floating_point else codes.round()
        for t in range(begin, end):
            s = after(s, steps[row, t], x[row, t], B[row, t])
            out = (s * C[row, t].double()[group][:, None, :]).sum(-1)
            out = out if D is None else out + D.double() * x[row, t].double()
            y[row, t] = out if z is None else out * F.silu(z[row, t].double())
            at = (start + count + t - begin) % rows
            for ring, value in zip(rings, (x, B, steps), strict=True):
                ring[slot, :, at] = value[row, t].to(ring.dtype)
    return (y, pool, *rings)


_AXES: dict[str, Axis] = {
    "batch_size": Var("Sequences."),
    "num_slots": Var("States of the pool."),
    "num_tokens": Var("New tokens of each sequence."),
    "num_rows": Var("Rows of a ring, at least twice the new tokens."),
    "num_heads": Const("Heads.", abbrev="h"),
    "num_groups": Const("Groups of heads that share B and C.", abbrev="g"),
    "dim": Const("Channels of a head.", abbrev="d"),
    "dstate": Const("Elements of a channel's state.", abbrev="n"),
}


def _by_token(*dims: str, **properties: Any) -> Tensor:
    return Tensor(["batch_size", "num_tokens", *dims], **properties)


def _ring(*dims: str, **properties: Any) -> Tensor:
    return Tensor(["num_slots", *dims], **properties)


def _per_slot(description: str) -> Tensor:
    return Tensor(["num_slots"], dtype="int32", description=description)


_POOL = ("num_slots", "num_heads", "dim", "dstate")
_X_RING = ("num_heads", "num_rows", "dim")
_B_RING = ("num_groups", "num_rows", "dstate")
_DT_RING = ("num_heads", "num_rows")
_INPUTS: dict[str, Value] = {
    "state": Tensor(list(_POOL), dtypes=_FLOATS),
    "x_cache": _ring(*_X_RING, dtype_from="x"),
    "B_cache": _ring(*_B_RING, dtype_from="x"),
    "dt_cache": _ring(*_DT_RING, dtype="float32"),
    "ring_start": _per_slot("Row of the oldest token that the state lacks."),
    "prev_num_accepted_tokens": _per_slot("Tokens that the state lacks."),
    "x": _by_token("num_heads", "dim", dtypes=_FLOATS, layout="rows"),
    "dt": _by_token("num_heads", "dim", dtypes=_FLOATS, description="Time step, one per head."),
    "A": Tensor(["num_heads", "dim", "dstate"], dtypes=_FLOATS, description="One per head."),
    "B": _by_token("num_groups", "dstate", dtype_from="x", layout="rows"),
    "C": _by_token("num_groups", "dstate", dtype_from="x", layout="rows"),
    "D": Tensor(["num_heads", "dim"], dtypes=_FLOATS, optional=True),
    "z": _by_token("num_heads", "dim", dtype_from="x", optional=True, layout="rows"),
    "dt_bias": Tensor(["num_heads", "dim"], dtypes=_FLOATS, optional=True),
    "state_batch_indices": Tensor(
        ["batch_size"], dtypes=_INTS, optional=True, description="Slot; -1: padding."
    ),
}
_OUTPUTS: dict[str, Value] = {
    "output": _by_token("num_heads", "dim", param="out", dtype_from="x", returned=True),
    "state": Tensor(list(_POOL), param="state", dtype_from="state"),
    "x_cache": _ring(*_X_RING, param="x_cache", dtype_from="x"),
    "B_cache": _ring(*_B_RING, param="B_cache", dtype_from="x"),
    "dt_cache": _ring(*_DT_RING, param="dt_cache", dtype="float32"),
}


def _init(arguments: dict[str, Any]) -> dict[str, Any]:
    """Decays below 1, rings of twice the tokens and more, and counts that fit the window."""
    x, state = arguments["x"], arguments["state"]
    slots, heads, dim, dstate = state.shape
    tokens, groups, rows = x.shape[1], arguments["B"].shape[2], arguments["x_cache"].shape[2]
    rows = max(rows, 2 * tokens)
    new = dict(device=x.device)
    generator = torch.Generator().manual_seed(0)
    arguments["x_cache"] = torch.randn(slots, heads, rows, dim, generator=generator).to(x)
    arguments["B_cache"] = torch.randn(slots, groups, rows, dstate, generator=generator).to(x)
    arguments["dt_cache"] = torch.rand(slots, heads, rows, generator=generator).to(x.device)
    numbers = torch.arange(slots, **new)
    arguments["ring_start"] = (numbers % rows).to(torch.int32)
    arguments["prev_num_accepted_tokens"] = (numbers % (rows - tokens + 1)).to(torch.int32)
    arguments["out"] = torch.empty_like(x)
    arguments["A"] = (-arguments["A"][:, :1, :1].abs()).expand(heads, dim, dstate)
    arguments["dt"] = arguments["dt"][..., :1].abs().expand(*x.shape)
    if arguments.get("dt_bias") is not None:
        arguments["dt_bias"] = arguments["dt_bias"][:, :1].expand(heads, dim)
    if arguments.get("state_batch_indices") is not None:
        values = torch.arange(x.shape[0], **new)
        arguments["state_batch_indices"] = torch.where(values < slots, values, -1).to(torch.int32)
    return arguments


checkpointing_ssu_trace = TraceTemplate(
    op_type="checkpointing_ssu",
    name_prefix="checkpointing_ssu",
    description="Mamba-2's next tokens on states that lack the tokens of their rings.",
    axes=_AXES,
    inputs=_INPUTS,
    outputs=_OUTPUTS,
    options={
        "dt_softplus": (False, True),
        "pad_slot_id": (-1,),
        "philox_rounds": (10,),
        "enable_pdl": (False, True),
        "precompute_heads_per_cta": (0,),
        "algorithm": ("auto", "monolith", "two-kernel"),
    },
    unsupported=[
        "state_scale", "rand_seed", "d_split", "cu_seqlens", "max_seqlen", "cb_scaled",
        "cumAdt_vec", "cb_old",
    ],
    constraints=["num_rows >= 2 * num_tokens"],
    tags=["status:verified", "stage:decode"],
    reference=_checkpointing_ssu_reference,
    init=_init,
)  # fmt: skip
