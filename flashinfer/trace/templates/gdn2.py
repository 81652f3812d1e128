"""Templates and reference of Gated DeltaNet-2: the recurrence, token by token, in float64."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Tensor, Value
from ..template import TraceTemplate
from .gated_delta_rule import (
    _CHUNK,
    _chunk_axes,
    _chunk_init,
    _normalize,
    _of_heads,
    _predict_sequences,
)


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    w: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Any:
    """S = S diag(exp(g)); S += (w v - S (beta k)) k^T; output = scale S q, per token and head.

    Source: NVIDIA, "Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention".
    """
    assert cu_seqlens is not None
    heads = max(q.shape[1], v.shape[1])
    q, k, v = (_of_heads(x, heads) for x in (q, k, v))
    if use_qk_l2norm_in_kernel:
        q, k = _normalize(q), _normalize(k)
    decay = torch.ones_like(k) if g is None else g.double().exp()
    erased = k if beta is None else beta.double() * k
    written = v if w is None else w.double() * v
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    bounds = [int(i) for i in cu_seqlens]
    out = torch.zeros_like(v)
    finals = out.new_zeros((len(bounds) - 1, heads, v.shape[2], k.shape[2]))
    for i, state in enumerate(finals):
        if initial_state is not None:
            state = initial_state[i].double()
        for t in range(bounds[i], bounds[i + 1]):
            state = state * decay[t][:, None, :]
            change = written[t] - torch.einsum("hvk,hk->hv", state, erased[t])
            state = state + change[..., None] * k[t][:, None, :]
            out[t] = factor * torch.einsum("hvk,hk->hv", state, q[t])
        finals[i] = state
    return (out, finals) if output_final_state else out


_FLOATS = ("float32", "bfloat16", "float16")


def _gate(dim: str, description: str) -> Tensor:
    return Tensor(
        ["num_tokens", "num_state_heads", dim],
        dtypes=_FLOATS,
        optional=True,
        description=description,
    )


def _template(final: bool, initial: bool) -> TraceTemplate:
    """As the chunked delta rule, with other gates and as many keys as queries."""
    chunk = _CHUNK[final, initial]
    gates: dict[str, Value] = {
        "g": _gate("head_dim_k", "Logarithm of the decay; 0."),
        "beta": _gate("head_dim_k", "Erase gate; 1."),
        "w": _gate("head_dim_v", "Write gate; 1."),
    }
    inputs: dict[str, Value] = {}
    for name, spec in chunk.inputs.items():
        if name == "g":
            inputs |= gates
        elif name != "beta":
            inputs[name] = spec
    inputs["k"] = Tensor(["num_tokens", "num_q_heads", "head_dim_k"], layout="rows", dtype_from="q")
    axes = {name: axis for name, axis in _chunk_axes(initial).items() if name != "num_k_heads"}
    unused = [*([] if initial else ["initial_state"]), *([] if final else ["output_state"])]
    return TraceTemplate(
        op_type="gdn2",
        name_prefix=chunk.name_prefix.replace("rule", "rule2"),
        description="Delta rule with decay, erase and write gates by channel, packed sequences.",
        axes=axes,
        inputs=inputs,
        outputs=chunk.outputs,
        options={
            "use_qk_l2norm_in_kernel": (False, True),
            "output_final_state": (final,),
            "backend": ("auto",),
        },
        unsupported=unused,
        constraints=[
            *chunk.constraints,
            "num_state_heads % num_q_heads == 0 and num_state_heads % num_v_heads == 0",
        ],
        tags=["status:verified", "stage:prefill"],
        reference=_reference,
        init=lambda arguments: _chunk_init(arguments, final),
        predict=_predict_sequences,
    )


_RULE2 = {key: _template(*key) for key in _CHUNK}


def chunk_gated_delta_rule2_trace(**arguments: Any) -> TraceTemplate:
    """The template for the states that the call takes and gives."""
    return _RULE2[
        bool(arguments.get("output_final_state")), arguments.get("initial_state") is not None
    ]


chunk_gated_delta_rule2_trace.templates = list(_RULE2.values())  # type: ignore[attr-defined]
