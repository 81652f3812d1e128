"""Template and reference of Mamba-2 over whole sequences: the recurrence in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..specs import Axis, Const, Tensor, Value, Var
from ..template import TraceTemplate

_FLOATS = ("float32", "bfloat16", "float16")
_HALF = ("bfloat16", "float16")


def _reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = True,
) -> Any:
    """S = exp(A dt) S + (dt x) B^T; out = (S C + D x) silu(z), per token and head.

    Source: T. Dao, A. Gu, "Transformers are SSMs", 2024.
    """
    step = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    heads = x.shape[2]
    group = torch.arange(heads, device=x.device) * B.shape[2] // heads
    keys, queries = B.double()[:, :, group], C.double()[:, :, group]
    if initial_states is None:
        state = x.new_zeros((x.shape[0], *x.shape[2:], B.shape[3]), dtype=torch.float64)
    else:
        state = initial_states.double()
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t in range(x.shape[1]):
        update = (step[:, t, :, None] * x[:, t].double())[..., None] * keys[:, t, :, None, :]
        state = torch.exp(A.double() * step[:, t])[..., None, None] * state + update
        out[:, t] = torch.einsum("bhdn,bhn->bhd", state, queries[:, t])
    if D is not None:
        out = out + D.double()[:, None] * x.double()
    if z is not None:
        out = out * F.silu(z.double())
    return (out, state) if return_final_states else out


_AXES: dict[str, Axis] = {
    "batch_size": Var("Sequences."),
    "seq_len": Var("Tokens of each sequence."),
    "num_heads": Const("Heads of x.", abbrev="h"),
    "num_groups": Const("Heads of B and C.", abbrev="g"),
    "head_dim": Const("Channels of a head.", abbrev="d"),
    "dstate": Const("Elements of a channel's state.", abbrev="n"),
}
# Only the kernels take these.
_KERNELS_ALONE = [
    "seq_idx",
    "chunk_indices",
    "chunk_offsets",
    "seq_chunk_cumsum",
    "num_seqs",
    "checkpoint_token_indices",
    "checkpoint_state_slots",
    "checkpoint_states",
]


def _tokens(*dims: str, **properties: Any) -> Tensor:
    return Tensor(["batch_size", "seq_len", *dims], **properties)


def _states(**properties: Any) -> Tensor:
    return Tensor(["batch_size", "num_heads", "head_dim", "dstate"], **properties)


def _weight(description: str, **properties: Any) -> Tensor:
    return Tensor(["num_heads"], dtype="float32", description=description, **properties)


_INPUTS: dict[str, Value] = {
    "x": _tokens("num_heads", "head_dim", layout="rows", dtypes=_HALF),
    "dt": _tokens("num_heads", dtypes=_FLOATS, description="Step."),
    "A": _weight("Logarithm of a step's decay."),
    "B": _tokens("num_groups", "dstate", layout="rows", dtype_from="x"),
    "C": _tokens("num_groups", "dstate", layout="rows", dtype_from="x"),
    "D": _weight("How much of x is added.", optional=True),
    "z": _tokens("num_heads", "head_dim", layout="rows", dtype_from="x", optional=True),
    "dt_bias": _weight("Added to dt.", optional=True),
    "initial_states": _states(dtypes=_FLOATS, optional=True),
}


def _init(arguments: dict[str, Any], final: bool) -> dict[str, Any]:
    """Positive steps, decays below 1, and numbers of groups that divide those of heads."""
    for name in ("x", "B", "C", "z"):
        if arguments.get(name) is not None and arguments[name].dtype == torch.float32:
            arguments[name] = arguments[name].bfloat16()
    arguments["dt"] = arguments["dt"].abs()
    arguments["A"] = -arguments["A"].abs()
    heads = arguments["x"].shape[2]
    for name in ("B", "C"):
        arguments[name] = arguments[name][:, :, :1].expand(-1, -1, heads, -1).contiguous()
    return {**arguments, "return_final_states": final}


def _template(final: bool) -> TraceTemplate:
    outputs: dict[str, Value] = {
        "out": _tokens("num_heads", "head_dim", param="out", dtype_from="x")
    }
    if final:
        outputs["final_states"] = _states(dtype_from="initial_states", dtype_default="float32")
    return TraceTemplate(
        op_type="ssd",
        name_prefix="ssd_combined_final" if final else "ssd_combined",
        description="Mamba-2 over the tokens of each sequence.",
        axes=_AXES,
        inputs=_INPUTS,
        outputs=outputs,
        options={
            "dt_softplus": (False, True),
            "dt_limit": ((0.0, float("inf")),),
            "update_seq_chunk_cumsum": (False, True),
            "return_final_states": (final,),
        },
        unsupported=_KERNELS_ALONE,
        constraints=["head_dim % 64 == 0", "dstate in (64, 128)"],
        tags=["status:verified", "stage:prefill"],
        reference=_reference,
        init=lambda arguments: _init(arguments, final),
        nest=lambda results: (results[0], results[1] if final else None),
    )


_TEMPLATES = {final: _template(final) for final in (False, True)}


def ssd_combined_fwd_trace(**arguments: Any) -> TraceTemplate:
    """The template for calls that return states, or do not."""
    return _TEMPLATES[bool(arguments.get("return_final_states", True))]


ssd_combined_fwd_trace.templates = list(_TEMPLATES.values())  # type: ignore[attr-defined]
