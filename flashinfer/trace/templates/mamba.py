"""Template and reference of Mamba's selective state update: the recurrence in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..specs import Axis, Const, Tensor, Value, Var
from ..template import TraceTemplate

_FLOATS = ("bfloat16", "float16", "float32")


def _steps(tensor: torch.Tensor, packed: bool) -> torch.Tensor:
    """[batch, tokens, ...]; packed tokens are one batch."""
    if packed:
        return tensor[None]
    if tensor.ndim == 2:
        return tensor[:, None, None]
    return tensor[:, None] if tensor.ndim == 3 else tensor


def _largest(dtype: torch.dtype) -> float:
    """Largest code of a scaled format; 0 for others."""
    if dtype == torch.int16:
        return 32767.0
    if dtype == torch.int8:
        return 127.0
    return 448.0 if dtype == torch.float8_e4m3fn else 0.0


def _quantize(state: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales of a scaled format (codes rounded); else the state as it is."""
    if _largest(dtype) == 0.0:
        return state, None
    scale = state.abs().amax(dim=-1) / _largest(dtype)
    codes = state / torch.where(scale > 0, scale, 1.0)[..., None]
    return codes if dtype.is_floating_point else codes.round(), scale


def _recurrence(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """S C and the state after each token of one sequence."""
    heads = state.shape[0]
    group = torch.arange(heads, device=x.device) * B.shape[1] // heads
    outputs, states = [], []
    for t in range(x.shape[0]):
        state = state * torch.exp(A * dt[t][..., None])
        state = state + (dt[t] * x[t])[..., None] * B[t, group][:, None, :]
        outputs.append((state * C[t, group][:, None, :]).sum(dim=-1))
        states.append(state)
    return (torch.stack(outputs) if outputs else torch.zeros_like(x)), states


def _selective_state_update_reference(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    disable_state_update: bool = False,
    dst_state_batch_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
) -> Any:
    """S = exp(A dt) S + (dt x) B; out = (S C + D x) silu(z), per token and head.

    Source: T. Dao, A. Gu, "Transformers are SSMs", 2024.
    """
    packed = cu_seqlens is not None
    pool = (state if state.ndim == 4 else state[:, None]).double().clone()
    scales = None if state_scale is None else state_scale.double().reshape(pool.shape[:3]).clone()
    A = A if A.ndim == 3 else A[None]
    D, dt_bias = (t if t is None or t.ndim == 2 else t[None] for t in (D, dt_bias))
    xs, dts, Bs, Cs = (_steps(t, packed).double() for t in (x, dt, B, C))
    if dt_bias is not None:
        dts = dts + dt_bias.double()
    if dt_softplus:
        dts = F.softplus(dts)
    y = torch.zeros_like(xs)
    bounds = [int(i) for i in cu_seqlens] if cu_seqlens is not None else []
    batch = len(bounds) - 1 if packed else xs.shape[0]
    write = state_batch_indices if dst_state_batch_indices is None else dst_state_batch_indices
    every = write is not None and write.ndim == 2 and write.shape[1] > 1
    for i in range(batch):
        at = (0, slice(bounds[i], bounds[i + 1])) if packed else (i, slice(None))
        column = 0 if num_accepted_tokens is None else max(int(num_accepted_tokens[i]) - 1, 0)
        slot = _slot(state_batch_indices, i, column)
        if state_batch_indices is not None and not _is_slot(slot, pool, pad_slot_id):
            continue
        start = pool[slot] if scales is None else pool[slot] * scales[slot][..., None]
        part, states = _recurrence(xs[at], dts[at], A.double(), Bs[at], Cs[at], start)
        if D is not None:
            part = part + D.double() * xs[at]
        if z is not None:
            part = part * F.silu(_steps(z, packed).double()[at])
        y[at] = part
        for t, s in enumerate(states):
            if disable_state_update or not (every or t == len(states) - 1):
                continue
            target = _slot(write, i, t if every else 0)
            if write is None or _is_slot(target, pool, pad_slot_id):
                pool[target], new_scale = _quantize(s, state.dtype)
                if scales is not None:
                    assert new_scale is not None
                    scales[target] = new_scale
    return y.reshape(x.shape), pool.reshape(state.shape)


def _is_slot(slot: int, pool: torch.Tensor, pad_slot: int) -> bool:
    """Whether a slot is one of the pool's, and not what means none."""
    return slot != pad_slot and 0 <= slot < len(pool)


def _slot(indices: torch.Tensor | None, sequence: int, column: int) -> int:
    if indices is None:
        return sequence
    return int(indices[sequence, column] if indices.ndim == 2 else indices[sequence])


_AXES: dict[str, Axis] = {
    "batch_size": Var("Sequences."),
    "num_slots": Var("States of the pool."),
    "num_heads": Const("Heads.", abbrev="h"),
    "num_groups": Const("Groups of heads that share B and C.", abbrev="g"),
    "dim": Const("Channels of a head.", abbrev="d"),
    "dstate": Const("Elements of a channel's state.", abbrev="n"),
}


def _template(tokens: bool) -> TraceTemplate:
    steps = ["num_tokens"] if tokens else []

    def by_token(*dims: str, **properties: Any) -> Tensor:
        return Tensor(["batch_size", *steps, *dims], **properties)

    inputs: dict[str, Value] = {
        "state": Tensor(["num_slots", "num_heads", "dim", "dstate"], dtypes=_FLOATS),
        "x": by_token("num_heads", "dim", dtypes=_FLOATS, layout="rows"),
        "dt": by_token("num_heads", "dim", dtypes=_FLOATS, description="Time step."),
        "A": Tensor(["num_heads", "dim", "dstate"], dtypes=_FLOATS, description="Decay's rate."),
        "B": by_token("num_groups", "dstate", dtype_from="x", layout="rows"),
        "C": by_token("num_groups", "dstate", dtype_from="x", layout="rows"),
        "D": Tensor(["num_heads", "dim"], dtypes=_FLOATS, description="Of x in the output."),
        "z": by_token("num_heads", "dim", dtype_from="x", optional=True, layout="rows"),
        "dt_bias": Tensor(["num_heads", "dim"], dtype_from="D", optional=True),
        "state_batch_indices": Tensor(
            ["batch_size"],
            dtypes=("int32", "int64"),
            optional=True,
            description="Slot; -1: padding.",
        ),
    }
    outputs: dict[str, Value] = {
        "output": by_token("num_heads", "dim", param="out", dtype_from="x"),
        "state": Tensor(
            ["num_slots", "num_heads", "dim", "dstate"], param="state", dtype_from="state"
        ),
    }
    unused = ["state_scale", "intermediate_state_indices", "rand_seed"]
    unused += ["intermediate_state_scales", "dst_state_batch_indices", "cu_seqlens"]
    unused += ["num_accepted_tokens", "intermediate_states_buffer"]
    suffix = "_tokens" if tokens else ""
    return TraceTemplate(
        op_type="selective_state_update",
        name_prefix=f"selective_state_update{suffix}",
        description="Mamba's recurrence for the next tokens of each sequence, state in place.",
        axes={**_AXES, **({"num_tokens": Var("Tokens of each sequence.")} if tokens else {})},
        inputs=inputs,
        outputs=outputs,
        options={
            "dt_softplus": (False, True),
            "disable_state_update": (False, True),
            "pad_slot_id": (-1,),
            "philox_rounds": (10,),
            "cache_steps": (0,),
            "algorithm": ("auto", "simple", "vertical", "horizontal"),
            "backend": ("auto", "flashinfer"),
        },
        unsupported=unused,
        tags=["status:verified", "stage:decode"],
        reference=_selective_state_update_reference,
        init=_init,
    )


def _init(arguments: dict[str, Any]) -> dict[str, Any]:
    """Decays below 1; slots that differ, and padding where there are too few."""
    arguments["A"] = -arguments["A"].abs()
    indices, slots = arguments.get("state_batch_indices"), arguments["state"].shape[0]
    if indices is None:
        return arguments
    values = torch.arange(indices.shape[0], device=indices.device)
    arguments["state_batch_indices"] = torch.where(values < slots, values, -1).to(torch.int32)
    return arguments


_TEMPLATES = {tokens: _template(tokens) for tokens in (False, True)}


def selective_state_update_trace(**arguments: Any) -> TraceTemplate:
    """The template for a call whose tokens have a dimension, or none."""
    return _TEMPLATES[getattr(arguments.get("x"), "ndim", 3) == 4]


selective_state_update_trace.templates = list(_TEMPLATES.values())  # type: ignore[attr-defined]
