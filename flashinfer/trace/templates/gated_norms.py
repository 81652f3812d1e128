"""Templates and references of norms with gates, of the residual stream and of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate

_SIXTEEN_BITS = ("bfloat16", "float16")


def _gated_residual_rmsnorm_reference(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
    gain_center: float = 0.0,
) -> torch.Tensor:
    """b = branch * (weight + gain_center); alpha * residual + beta * b / sqrt(mean(b^2) + eps).

    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    b = branch.double()
    if weight is not None:
        b = b * (weight.double() + gain_center)
    normed = b * torch.rsqrt(b.square().mean(dim=-1, keepdim=True) + eps)
    return alpha.double() * residual.double() + beta.double() * normed


def _gated_residual_next_rmsnorm_reference(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: torch.Tensor | float,
    beta: torch.Tensor,
    post_eps: float = 1e-6,
    next_eps: float = 1e-6,
    next_gain_center: float = 0.0,
    post_weight: torch.Tensor | None = None,
    post_gain_center: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = alpha * residual + beta * rmsnorm(branch); s / sqrt(mean(s^2) + eps) * next_weight.

    Source: as gated_residual_rmsnorm.
    """
    b = branch.double()
    if post_weight is not None:
        b = b * (post_weight.double() + post_gain_center)
    normed = b * torch.rsqrt(b.square().mean(dim=-1, keepdim=True) + post_eps)
    gate = alpha.double() if isinstance(alpha, torch.Tensor) else alpha
    total = gate * residual.double() + beta.double() * normed
    inv_rms = torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + next_eps)
    return total, total * inv_rms * (next_weight.double() + next_gain_center)


def _rmsnorm_sigmoid_gate_reference(
    input: torch.Tensor, gate: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * sigmoid(gate), over the last dimension.

    Source: as gated_residual_rmsnorm; Z. Qiu et al., "Gated Attention for Large Language Models",
    2025.
    """
    x = input.double()
    return (
        x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * torch.sigmoid(gate.double())
    )


_ROWS = ["batch_size", "hidden_size"]


def _axes() -> dict[str, Axis]:
    return {
        "batch_size": Var("Rows that are normalised."),
        "hidden_size": Const("Elements of a row.", abbrev="h"),
    }


def _rows(**properties: Any) -> Tensor:
    return Tensor(_ROWS, layout="rows", **properties)


def _columns(**properties: Any) -> Tensor:
    return Tensor(["hidden_size"], layout="rows", **properties)


def _eps(name: str) -> Scalar:
    return Scalar(minimum=0, description=f"Added to the mean square of {name}.")


_BRANCH = _rows(dtypes=_SIXTEEN_BITS)
_STREAM = _rows(dtype="float32", description="Residual stream.")
_BETA = _columns(dtype="float32", description="Gate of the branch.")
_ALPHA = _columns(dtype="float32", description="Gate of the stream.")
_CENTER = Scalar(description="Added to the weight.")
_CONSTRAINTS = ["hidden_size % 8 == 0", "hidden_size <= 8192"]


def _in_vectors(arguments: dict[str, Any]) -> dict[str, Any]:
    """An example call whose rows are whole vectors, and whose branch is of 16 bits."""
    wide = {
        name: torch.cat([value] * 8, dim=-1)
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor)
    }
    given = wide["branch"].dtype
    dtype = torch.bfloat16 if given == torch.float32 else given
    for name in wide.keys() & {"branch", "next_weight"}:
        wide[name] = wide[name].to(dtype)
    weight = "post_weight" if "next_weight" in arguments else "weight"
    return {**arguments, **wide, weight: wide["beta"].to(dtype)}


gated_residual_rmsnorm_trace = TraceTemplate(
    op_type="gated_residual_rmsnorm",
    description="Gated sum of the residual stream and a normalised branch.",
    axes=_axes(),
    inputs={
        "branch": _BRANCH,
        "residual": _STREAM,
        "weight": _columns(dtype_from="branch", optional=True),
        "alpha": _ALPHA,
        "beta": _BETA,
        "eps": _eps("the branch"),
        "gain_center": _CENTER,
    },
    outputs={"output": _rows(param="out", dtype="float32", in_place_of="residual")},
    constraints=_CONSTRAINTS,
    tags=["status:verified", "fused"],
    reference=_gated_residual_rmsnorm_reference,
    init=_in_vectors,
    hints=["enable_pdl"],
)


def _next(alpha: Value, suffix: str) -> TraceTemplate:
    return TraceTemplate(
        op_type="gated_residual_rmsnorm",
        name_prefix="gated_residual_next_rmsnorm" + suffix,
        description="Gated sum of the residual stream and a normalised branch, and its RMS norm.",
        axes=_axes(),
        inputs={
            "branch": _BRANCH,
            "residual": _STREAM,
            "next_weight": _columns(dtype_from="branch"),
            "alpha": alpha,
            "beta": _BETA,
            "post_eps": _eps("the branch"),
            "next_eps": _eps("the sum"),
            "next_gain_center": _CENTER,
            "post_weight": _columns(dtype_from="branch", optional=True),
            "post_gain_center": _CENTER,
        },
        outputs={
            "residual_out": _rows(param="residual_out", dtype="float32", in_place_of="residual"),
            "ffn_input": _rows(param="ffn_input", dtype_from="branch", in_place_of="branch"),
        },
        constraints=_CONSTRAINTS,
        tags=["status:verified", "fused"],
        reference=_gated_residual_next_rmsnorm_reference,
        init=_in_vectors,
        hints=["enable_pdl"],
    )


_PER_COLUMN = _next(_ALPHA, "")
_SHARED = _next(Scalar(description="Gate of the stream."), "_shared_alpha")


def _trace(**arguments: Any) -> TraceTemplate:
    return _PER_COLUMN if isinstance(arguments.get("alpha"), torch.Tensor) else _SHARED


gated_residual_next_rmsnorm_trace: Callable[..., TraceTemplate] = _trace
gated_residual_next_rmsnorm_trace.templates = [_PER_COLUMN, _SHARED]  # type: ignore[attr-defined]


def _heads(arguments: dict[str, Any]) -> dict[str, Any]:
    """An example call with heads of 64."""
    wide = {n: torch.cat([arguments[n]] * 64, dim=-1)[..., :64] for n in ("input", "gate")}
    is_wide = wide["input"].dtype == torch.float32
    return {**arguments, **{n: x.bfloat16() if is_wide else x for n, x in wide.items()}}


rmsnorm_sigmoid_gate_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="rmsnorm_sigmoid_gate",
    description="RMS norm of heads and a sigmoid gate, in place.",
    axes={
        "num_heads": Var("Heads of all rows."),
        "head_dim": Const("Elements of a head.", abbrev="d"),
    },
    inputs={
        "heads": Tensor(
            ["num_heads", "head_dim"],
            param="input",
            dtypes=_SIXTEEN_BITS,
            ranks=(2, 3),
            layout="rows",
        ),
        "gate": Tensor(["num_heads", "head_dim"], dtype_from="heads", ranks=(2, 3), layout="rows"),
        "eps": _eps("a head"),
    },
    outputs={
        "output": Tensor(
            ["num_heads", "head_dim"],
            param="input",
            dtype_from="heads",
            ranks=(2, 3),
            layout="rows",
        )
    },
    constraints=["head_dim in (8, 16, 32, 64, 128, 256)"],
    tags=["status:verified", "fused"],
    reference=_rmsnorm_sigmoid_gate_reference,
    init=_heads,
    hints=["enable_pdl"],
)
