"""Templates and reference of gated DeltaProduct over packed sequences."""

from __future__ import annotations

from typing import Any

import torch

from ..specs import Axis, Const, Tensor, Value, Var
from ..template import TraceTemplate
from .gated_delta_rule import _CHUNK, _chunk_axes, _chunk_init, _chunk_reference, _predict_sequences


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    num_householder: int = 1,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Any:
    """S = g S; S += beta_j (v_j - S k_j) k_j^T for each j of a token; output = scale S q.

    Source: J. Siems et al., "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder
    Products", 2025.
    """
    assert cu_seqlens is not None
    steps = num_householder
    decay = g
    if g is not None:  # once a token, before its first update
        decay = torch.ones((steps * g.shape[0], g.shape[1]), dtype=g.dtype, device=g.device)
        decay[::steps] = g
    results = _chunk_reference(
        q.repeat_interleave(steps, 0), k, v, decay, beta, scale, initial_state, output_final_state,
        cu_seqlens * steps, use_qk_l2norm_in_kernel,
    )  # fmt: skip
    if output_final_state:
        return results[0][steps - 1 :: steps], results[1]
    return results[steps - 1 :: steps]


def _init(arguments: dict[str, Any], final: bool) -> dict[str, Any]:
    """Two updates of each token."""
    arguments = _chunk_init(arguments, final)
    rows = torch.arange(2 * arguments["q"].shape[0], device=arguments["q"].device)
    for name in ("k", "v"):
        arguments[name] = arguments[name][rows % arguments[name].shape[0]]
    return {**arguments, "num_householder": 2}


def _template(final: bool, initial: bool) -> TraceTemplate:
    """Keys, values and learning rates have more rows than those of the chunked delta rule."""
    chunk = _CHUNK[final, initial]
    axes: dict[str, Axis] = {
        **_chunk_axes(initial),
        "num_householder": Const("Updates of the state by a token.", abbrev="n"),
        "num_updates": Var("Updates of all tokens."),
    }
    inputs: dict[str, Value] = dict(chunk.inputs)
    for name, heads, *dim in (
        ("k", "num_k_heads", "head_dim_k"),
        ("v", "num_v_heads", "head_dim_v"),
    ):
        inputs[name] = Tensor(["num_updates", heads, *dim], layout="rows", dtype_from="q")
    inputs["beta"] = Tensor(
        ["num_updates", "num_state_heads"], dtype="float32", optional=True, description="Rate; 1."
    )
    unused = [*([] if initial else ["initial_state"]), *([] if final else ["output_state"])]
    return TraceTemplate(
        op_type="gdn",
        name_prefix=chunk.name_prefix.replace("rule", "product"),
        description="Gated delta rule over packed sequences, several updates for each token.",
        axes=axes,
        inputs=inputs,
        outputs=chunk.outputs,
        options={
            "use_qk_l2norm_in_kernel": (False, True),
            "output_final_state": (final,),
            "backend": ("auto",),
        },
        unsupported=unused,
        constraints=[*chunk.constraints, "num_updates == num_householder * num_tokens"],
        tags=["status:verified", "stage:prefill"],
        reference=_reference,
        init=lambda arguments: _init(arguments, final),
        predict=_predict_sequences,
    )


_PRODUCT = {key: _template(*key) for key in _CHUNK}


def chunk_gated_delta_product_trace(**arguments: Any) -> TraceTemplate:
    """The template for the states that the call takes and gives."""
    return _PRODUCT[
        bool(arguments.get("output_final_state")), arguments.get("initial_state") is not None
    ]


chunk_gated_delta_product_trace.templates = list(_PRODUCT.values())  # type: ignore[attr-defined]
