"""Templates and references of the layer norms of diffusion transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..specs import Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate

_SIXTEEN_BITS = ("bfloat16", "float16")


def _gamma_beta_reference(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    input_global_scaling_factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = residual + input * (gate + gate_bias); layernorm(h) * gamma + beta.

    Source: J. L. Ba et al., "Layer Normalization", 2016; W. Peebles, S. Xie, "Scalable Diffusion
    Models with Transformers", 2023.
    """
    x = input.double()
    if input_global_scaling_factor is not None:
        x = x * input_global_scaling_factor.double()
    factor = gate.double() if gate_bias is None else gate.double() + gate_bias.double()
    h = residual.double() + x * factor
    centred = h - h.mean(dim=-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + epsilon)
    return h, normed * gamma.double() + beta.double()


def _gated_reference(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    input_global_scaling_factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = residual + input * gate; layernorm(h) * (1 + scale) + shift, all with their biases.

    Source: as fused_dit_gate_residual_layernorm_gamma_beta.
    """
    x = input.double()
    if input_global_scaling_factor is not None:
        x = x * input_global_scaling_factor.double()
    factor = gate.double() if gate_bias is None else gate.double() + gate_bias.double()
    h = residual.double() + x * factor
    centred = h - h.mean(dim=-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + epsilon)
    gain = 1 + (scale.double() if scale_bias is None else scale.double() + scale_bias.double())
    offset = shift.double() if shift_bias is None else shift.double() + shift_bias.double()
    return h, normed * gain + offset


def _plain_reference(
    input: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    residual: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    input_global_scaling_factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = residual + input; layernorm(h) * (1 + scale) + shift, with their biases.

    Source: as fused_dit_gate_residual_layernorm_gamma_beta.
    """
    h = input.double()
    if input_global_scaling_factor is not None:
        h = h * input_global_scaling_factor.double()
    if residual is not None:
        h = h + residual.double()
    centred = h - h.mean(dim=-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + epsilon)
    gain = 1 + (scale.double() if scale_bias is None else scale.double() + scale_bias.double())
    offset = shift.double() if shift_bias is None else shift.double() + shift_bias.double()
    return h, normed * gain + offset


def _axes() -> dict[str, Axis]:
    return {
        "batch_size": Var("Images or videos."),
        "num_rows": Var("Rows of each."),
        "hidden_size": Const("Elements of a row.", abbrev="h"),
        "one": Const("A single number.", abbrev="", value=1),
    }


def _rows(**properties: Any) -> Tensor:
    return Tensor(["batch_size", "num_rows", "hidden_size"], layout="rows", **properties)


def _columns(**properties: Any) -> Tensor:
    return Tensor(["hidden_size"], dtype="float32", layout="rows", **properties)


_INPUT = _rows(param="input", dtypes=_SIXTEEN_BITS)


def _like(**properties: Any) -> Tensor:
    return _rows(dtype_from="hidden_states", **properties)


def _bias() -> Tensor:
    return _columns(optional=True)


_EPS = Scalar(minimum=0, description="Added to the variance under the root.")
_FACTOR = Tensor(["one"], dtype="float32", optional=True, description="Factor of the input.")


def _in_vectors(arguments: dict[str, Any]) -> dict[str, Any]:
    """An example call whose rows are whole vectors of 16 bits."""
    wide = {
        name: torch.cat([value] * 8, dim=-1)
        if isinstance(value, torch.Tensor) and name != "input_global_scaling_factor"
        else value
        for name, value in arguments.items()
    }
    if wide["input"].dtype == torch.float32:
        rows = wide.keys() & {"input", "residual", "gate", "scale", "shift"}
        wide |= {name: wide[name].bfloat16() for name in rows}
    return wide


def _with_columns(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Biases of one row as columns."""
    return {
        name: value[0] if name.endswith("_bias") and _is_row(value) else value
        for name, value in arguments.items()
    }


def _is_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[0] == 1


def _template(
    name: str, description: str, inputs: dict[str, Value], reference: Any
) -> TraceTemplate:
    return TraceTemplate(
        op_type="modulated_layernorm",
        name_prefix=name,
        description=description,
        axes=_axes(),
        inputs={
            "hidden_states": _INPUT,
            **inputs,
            "epsilon": _EPS,
            "input_global_scaling_factor": _FACTOR,
        },
        outputs={
            "residual_out": _like(param="residual_out", in_place_of="residual"),
            "norm_out": _like(param="norm_out", in_place_of="input"),
        },
        constraints=["hidden_size % 8 == 0", "hidden_size <= 6144"],
        tags=["status:verified", "fused"],
        reference=reference,
        init=_in_vectors,
        gather=_with_columns,
        options={
            "use_nvfp4": (False,),
            "use_mxfp8": (False,),
            "global_scaling_factor": (None,),
            "sf_out": (None,),
        },
    )


fused_dit_gate_residual_layernorm_gamma_beta_trace = _template(
    "fused_dit_gate_residual_layernorm_gamma_beta",
    "Gated residual sum, then layer norm.",
    {
        "residual": _like(),
        "gate": _like(),
        "gamma": _columns(),
        "beta": _columns(),
        "gate_bias": _bias(),
    },
    _gamma_beta_reference,
)

fused_dit_gate_residual_layernorm_scale_shift_trace = _template(
    "fused_dit_gate_residual_layernorm_scale_shift",
    "Gated residual sum, then layer norm whose scale and shift are tensors.",
    {
        "residual": _like(),
        "gate": _like(),
        "scale": _like(),
        "shift": _like(),
        "gate_bias": _bias(),
        "scale_bias": _bias(),
        "shift_bias": _bias(),
    },
    _gated_reference,
)

fused_dit_residual_layernorm_scale_shift_trace = _template(
    "fused_dit_residual_layernorm_scale_shift",
    "Residual sum, then layer norm whose scale and shift are tensors.",
    {
        "scale": _like(),
        "shift": _like(),
        "residual": _like(optional=True),
        "scale_bias": _bias(),
        "shift_bias": _bias(),
    },
    _plain_reference,
)
