"""Templates of the norms in CuTe-DSL: those of `norm.py` with another order of arguments.

The references differ in the weight alone, to which `weight_bias` is added.
"""

from __future__ import annotations

import torch

from ..specs import FLOATING, Const, Tensor, Var
from ..template import TraceTemplate
from .norm import (
    _AFFINE,
    _EPS,
    _INPUT,
    _INPUT_OUT,
    _OUT,
    _QUANTIZED,
    _RESIDUAL,
    _RESIDUAL_OUT,
    _SCALE,
    _WEIGHT,
    _axes,
    _layer_normalize,
    _quantize,
    _rms_normalize,
)

_HEADS = ["batch_size", "num_heads", "head_dim"]
_WEIGHT_BIAS = {"weight_bias": (0.0, 1.0)}


def _rmsnorm_cute_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + weight_bias), over the last dimension.

    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return _rms_normalize(input.double(), eps) * (weight.double() + weight_bias)


def _qk_rmsnorm_cute_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + weight_bias), over each head.

    Source: as rmsnorm_cute.
    """
    return _rms_normalize(input.double(), eps) * (weight.double() + weight_bias)


def _rmsnorm_quant_cute_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
) -> torch.Tensor:
    """out = saturate(rmsnorm(input) * (weight + weight_bias) / scale) in the dtype of `out`.

    Source: as rmsnorm_cute; saturation as in P. Micikevicius et al., "FP8 Formats for Deep
    Learning", 2022.
    """
    y = _rms_normalize(input.double(), eps) * (weight.double() + weight_bias)
    return _quantize(y, scale, out.dtype)


def _fused_add_rmsnorm_cute_reference(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = input + residual; input becomes rmsnorm(s) * (weight + weight_bias), residual becomes s.

    The norm reads the sum before it is rounded for storage in `residual`.
    Source: as rmsnorm_cute.
    """
    total = input.double() + residual.double()
    return _rms_normalize(total, eps) * (weight.double() + weight_bias), total


def _fused_add_rmsnorm_quant_cute_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = input + residual; out = saturate(rmsnorm(s) * (weight + weight_bias) / scale).

    The norm reads the sum before it is rounded for storage in `residual`; `input` is unchanged.
    Source: as rmsnorm_quant_cute.
    """
    total = input.double() + residual.double()
    y = _rms_normalize(total, eps) * (weight.double() + weight_bias)
    return _quantize(y, scale, out.dtype), total


def _layernorm_cute_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * gemma + beta, with the biased variance.

    Source: J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", 2016.
    """
    return _layer_normalize(input.double(), eps) * gemma.double() + beta.double()


rmsnorm_cute_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="rmsnorm_cute",
    description="Root mean square normalisation of each row, times a weight.",
    axes=_axes(),
    inputs={
        "hidden_states": _INPUT,
        "weight": _WEIGHT,
        "eps": _EPS,
    },
    outputs={"output": _OUT},
    reference=_rmsnorm_cute_reference,
    options=_WEIGHT_BIAS,
    hints=["enable_pdl"],
)

qk_rmsnorm_cute_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="qk_rmsnorm_cute",
    description="Root mean square normalisation of each head, times a weight.",
    axes={
        "batch_size": Var("Tokens."),
        "num_heads": Const("Heads of queries or of keys.", abbrev="n"),
        "head_dim": Const("Elements of a head.", abbrev="d"),
    },
    inputs={
        "hidden_states": Tensor(_HEADS, param="input", layout="rows", dtypes=FLOATING),
        "weight": Tensor(["head_dim"], layout="rows", dtype_from="hidden_states"),
        "eps": _EPS,
    },
    outputs={
        "output": Tensor(
            _HEADS,
            param="output",
            layout="rows",
            dtype_from="hidden_states",
            in_place_of="input",
        )
    },
    reference=_qk_rmsnorm_cute_reference,
    options=_WEIGHT_BIAS,
    hints=["enable_pdl"],
)

rmsnorm_quant_cute_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="rmsnorm_quant_cute",
    description="Root mean square normalisation with a saturating 8-bit float result.",
    axes=_axes(),
    inputs={
        "hidden_states": _INPUT,
        "weight": _WEIGHT,
        "scale": _SCALE,
        "eps": _EPS,
    },
    outputs={"output": _QUANTIZED},
    tags=["fused", "quantize"],
    reference=_rmsnorm_quant_cute_reference,
    options=_WEIGHT_BIAS,
    hints=["enable_pdl"],
)

fused_add_rmsnorm_cute_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="fused_add_rmsnorm_cute",
    description="Residual addition, then root mean square normalisation of the unrounded sum.",
    axes=_axes(),
    inputs={
        "hidden_states": _INPUT,
        "residual": _RESIDUAL,
        "weight": _WEIGHT,
        "eps": _EPS,
    },
    outputs={"output": _INPUT_OUT, "residual_out": _RESIDUAL_OUT},
    tags=["fused"],
    reference=_fused_add_rmsnorm_cute_reference,
    options=_WEIGHT_BIAS,
    hints=["enable_pdl"],
)

fused_add_rmsnorm_quant_cute_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="fused_add_rmsnorm_quant_cute",
    description="Residual addition, then rmsnorm_quant_cute of the unrounded sum.",
    axes=_axes(),
    inputs={
        "hidden_states": _INPUT,
        "residual": _RESIDUAL,
        "weight": _WEIGHT,
        "scale": _SCALE,
        "eps": _EPS,
    },
    outputs={"output": _QUANTIZED, "residual_out": _RESIDUAL_OUT},
    tags=["fused", "quantize"],
    reference=_fused_add_rmsnorm_quant_cute_reference,
    options=_WEIGHT_BIAS,
    hints=["enable_pdl"],
)

layernorm_cute_trace = TraceTemplate(
    op_type="layernorm",
    name_prefix="layernorm_cute",
    description="Layer normalisation of each row with a float32 factor and offset per element.",
    axes=_axes(),
    inputs={"hidden_states": _INPUT, **_AFFINE, "eps": _EPS},
    outputs={"output": _OUT},
    reference=_layernorm_cute_reference,
    hints=["enable_pdl"],
)
