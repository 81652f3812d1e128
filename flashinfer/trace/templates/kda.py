"""Templates and references of Kimi Delta Attention: the recurrence, token by token, in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate
from .gated_delta_rule import delta_rule_recurrence, halved

_FLOATS = ("float32", "bfloat16", "float16")


def _decay(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> torch.Tensor:
    """Decays of the gate's inputs, or (without A_log) of their logarithms."""
    if A_log is None:
        return g.double().exp()
    bias = torch.zeros((), device=g.device) if dt_bias is None else dt_bias.view(g.shape[2:])
    rate, shifted = A_log.double().flatten()[:, None].exp(), g.double() + bias.double()
    if lower_bound is None:
        return torch.exp(-rate * F.softplus(shifted))
    return torch.exp(lower_bound * torch.sigmoid(rate * shifted))


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    lower_bound: float | None = None,
    beta_is_logit: bool = False,
    disable_state_update: bool = False,
) -> Any:
    """S = S diag(decay); S += beta (v - S k) k^T; output = scale S q, per token and head.

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.
    """
    decay = _decay(g, A_log, dt_bias, lower_bound)
    rate = torch.sigmoid(beta.double()) if beta_is_logit else beta.double()
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    if initial_state is None:
        state = out.new_zeros((v.shape[0], v.shape[2], v.shape[3], q.shape[3]))
    else:
        state = initial_state.double().clone()
    for i in range(q.shape[0]):
        out[i], states = delta_rule_recurrence(
            q[i], k[i], v[i], decay[i], rate[i], state[i], factor, use_qk_l2norm_in_kernel
        )
        if states and not disable_state_update:
            state[i] = states[-1]
    return (out, state) if initial_state is not None or output_final_state else out


_AXES: dict[str, Axis] = {
    "batch_size": Var("Sequences."),
    "num_tokens": Var("Tokens of each sequence."),
    "num_heads": Const("Heads of q and k.", abbrev="h"),
    "num_v_heads": Const("Heads of v and of the state.", abbrev="hv"),
    "head_dim_k": Const("Elements of a key.", abbrev="k"),
    "head_dim_v": Const("Elements of a value.", abbrev="v"),
}
# Only the kernels take these.
_KERNELS_ALONE = [
    "cu_seqlens",
    "ssm_state_indices",
    "num_spec_tokens",
    "num_accepted_tokens",
    "initial_state_source",
    "initial_state_indices",
    "seq_order",
    "prefill_workspace",
    "state_checkpoints",
    "checkpoint_cu_starts",
    "checkpoint_state_indices",
    "correction_cache",
    "kg_cache",
]
_GATE = ("A_log", "dt_bias", "lower_bound")


def _tokens(heads: str, *dim: str, **properties: Any) -> Tensor:
    return Tensor(["batch_size", "num_tokens", heads, *dim], layout="rows", **properties)


def _states(**properties: Any) -> Tensor:
    return Tensor(["batch_size", "num_v_heads", "head_dim_v", "head_dim_k"], **properties)


def _inputs(initial: bool, gate: bool) -> dict[str, Value]:
    inputs: dict[str, Value] = {
        "q": _tokens("num_heads", "head_dim_k", dtypes=("bfloat16", "float16")),
        "k": _tokens("num_heads", "head_dim_k", dtype_from="q"),
        "v": _tokens("num_v_heads", "head_dim_v", dtype_from="q"),
        "g": _tokens("num_v_heads", "head_dim_k", dtypes=_FLOATS, description="Gate."),
        "beta": _tokens("num_v_heads", dtypes=_FLOATS, description="Learning rate."),
        "scale": Scalar(optional=True, description="Factor of the output; 1 / sqrt(head_dim_k)."),
    }
    if gate:
        inputs["A_log"] = Tensor(["num_v_heads"], dtype="float32", description="Decay's rate.")
        inputs["dt_bias"] = Tensor(["num_v_heads", "head_dim_k"], dtypes=_FLOATS, optional=True)
        inputs["lower_bound"] = Scalar(optional=True, description="Lowest logarithm of a decay.")
    if initial:
        inputs["initial_state"] = _states(dtypes=_FLOATS, description="Key axis last.")
    return inputs


def _template(initial: bool, final: bool, gate: bool) -> TraceTemplate:
    """For calls with an initial state, that return states, that compute the gate."""
    outputs: dict[str, Value] = {
        "output": _tokens("num_v_heads", "head_dim_v", param="output", dtype_from="q")
    }
    if initial:
        outputs["initial_state"] = _states(param="initial_state", dtype_from="initial_state")
    elif final:
        outputs["final_state"] = _states(dtype="float32")
    unused = [*_KERNELS_ALONE, *([] if initial else ["initial_state"]), *(() if gate else _GATE)]
    suffix = "".join(
        name for name, on in (("_gate", gate), ("_initial", initial), ("_final", final)) if on
    )

    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        extra = {"lower_bound": -5.0} if gate else {"g": -arguments["g"].abs()}
        flags = {"output_final_state": final, "use_gate_in_kernel": gate}
        return {**halved(arguments), **flags, **extra}

    return TraceTemplate(
        op_type="kda",
        name_prefix=f"recurrent_kda{suffix}",
        description="Delta rule with a decay per key channel, over the tokens of each sequence.",
        axes=_AXES,
        inputs=_inputs(initial, gate),
        outputs=outputs,
        options={
            "use_qk_l2norm_in_kernel": (True, False),
            "beta_is_logit": (False, True),
            "disable_state_update": (False, True),
            "output_final_state": (final,),
            "use_gate_in_kernel": (gate,),
            "checkpoint_every_n_tokens": (0,),
            "backend": ("auto", "flashinfer"),
        },
        hints=unused,
        constraints=["head_dim_k in (32, 64, 128, 256)"],
        tags=["status:verified"],
        reference=_reference,
        init=init,
        nest=lambda results: (results[0], results[1] if final else None),
    )


_TEMPLATES = {
    (initial, final, gate): _template(initial, final, gate)
    for initial in (False, True)
    for final in (False, True)
    for gate in (False, True)
}


def recurrent_kda_trace(**arguments: Any) -> TraceTemplate:
    """The template for the states that the call takes and gives, and for its gate."""
    return _TEMPLATES[
        arguments.get("initial_state") is not None,
        bool(arguments.get("output_final_state")),
        bool(arguments.get("use_gate_in_kernel")),
    ]


recurrent_kda_trace.templates = list(_TEMPLATES.values())  # type: ignore[attr-defined]
