"""Templates and references of the normalisation operations.

The references compute in float64 and return unrounded results: whoever uses one rounds once, to
the dtype of the output. `enable_pdl` is a scheduling hint (programmatic dependent launch) and
changes no result; `out` receives the result and is not read.
"""

from __future__ import annotations

from typing import Any

import torch

from ..specs import FLOATING, Axis, Const, Scalar, Tensor, Value, Var
from ..template import TraceTemplate

_FP8 = ("float8_e4m3fn", "float8_e5m2")


def _rms_normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _layer_normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) over the last dimension, with the biased variance."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)


def _quantize(y: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y / scale, limited to the finite range of `dtype`; `scale` is the dequantisation scale."""
    divisor = scale.double().reshape(()) if isinstance(scale, torch.Tensor) else scale
    limit = torch.finfo(dtype).max
    return (y / divisor).clamp(-limit, limit)


def _rmsnorm_reference(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return _rms_normalize(input.double(), eps) * weight.double()


def _fused_add_rmsnorm_reference(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = input + residual; input becomes rmsnorm(s) * weight, residual becomes s.

    The norm reads the sum before it is rounded for storage in `residual`.
    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    total = input.double() + residual.double()
    return _rms_normalize(total, eps) * weight.double(), total


def _gemma_rmsnorm_reference(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (1 + weight), over the last dimension.

    Source: Gemma Team, "Gemma: Open Models Based on Gemini Research and Technology", 2024, whose
    checkpoints store the weight minus one.
    """
    return _rms_normalize(input.double(), eps) * (1 + weight.double())


def _gemma_fused_add_rmsnorm_reference(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = input + residual; input becomes rmsnorm(s) * (1 + weight), residual becomes s.

    The norm reads the sum before it is rounded for storage in `residual`.
    Source: as gemma_rmsnorm.
    """
    total = input.double() + residual.double()
    return _rms_normalize(total, eps) * (1 + weight.double()), total


def _layernorm_reference(
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * gemma + beta, with the biased variance.

    Source: J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", 2016.
    """
    return _layer_normalize(input.double(), eps) * gemma.double() + beta.double()


def _rmsnorm_quant_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """out = saturate(rmsnorm(input) * weight / scale) in the 8-bit float dtype of `out`.

    Source: as rmsnorm; saturation as in P. Micikevicius et al., "FP8 Formats for Deep
    Learning", 2022.
    """
    return _quantize(_rms_normalize(input.double(), eps) * weight.double(), scale, out.dtype)


def _fused_add_rmsnorm_quant_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = input + residual; out = saturate(rmsnorm(s) * weight / scale), residual becomes s.

    The norm reads the sum before it is rounded for storage in `residual`; `input` is unchanged.
    Source: as rmsnorm_quant.
    """
    total = input.double() + residual.double()
    return _quantize(_rms_normalize(total, eps) * weight.double(), scale, out.dtype), total


def _layernorm_quant_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
) -> torch.Tensor:
    """out = saturate(layernorm(input, gemma, beta) / scale) in the 8-bit float dtype of `out`.

    Source: as layernorm and rmsnorm_quant.
    """
    y = _layer_normalize(input.double(), eps) * gemma.double() + beta.double()
    return _quantize(y, scale, out.dtype)


_ROWS = ["batch_size", "hidden_size"]
_EPS = Scalar(minimum=0, description="Added to the mean square (or variance) under the root.")
_SCALE = Scalar(above=0, tensor=True, description="Dequantisation scale; the result is divided.")


def _axes() -> dict[str, Axis]:
    return {
        "batch_size": Var("Rows that are normalised; tokens, or tokens times heads."),
        "hidden_size": Const("Elements of a row.", abbrev="h"),
    }


def _rows(**properties: Any) -> Tensor:
    return Tensor(_ROWS, ranks=(2, 3), layout="rows", **properties)


def _vector(**properties: Any) -> Tensor:
    return Tensor(["hidden_size"], layout="rows", **properties)


_INPUT = _rows(param="input", dtypes=FLOATING)
_RESIDUAL = _rows(dtype_from="hidden_states")
_WEIGHT = _vector(dtype_from="hidden_states")
_AFFINE: dict[str, Value] = {
    "gemma": _vector(dtype="float32", description="Factor per element."),
    "beta": _vector(dtype="float32", description="Offset per element."),
}
_RESIDUAL_OUT = _rows(
    param="residual",
    dtype_from="residual",
    description="hidden_states + residual; the operation writes it over residual.",
)
_QUANTIZED = _rows(param="out", dtypes=_FP8, description="Quantised result.")


_OUT = _rows(param="out", dtype_from="hidden_states", in_place_of="input")
_RETURNED = _rows(dtype_from="hidden_states")
_INPUT_OUT = _rows(param="input", dtype_from="hidden_states")


rmsnorm_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="rmsnorm",
    description="Root mean square normalisation of each row, times a weight.",
    axes=_axes(),
    inputs={"hidden_states": _INPUT, "weight": _WEIGHT, "eps": _EPS},
    outputs={"output": _OUT},
    tags=["status:verified"],
    reference=_rmsnorm_reference,
    hints=["enable_pdl"],
)

fused_add_rmsnorm_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="fused_add_rmsnorm",
    description="Residual addition, then root mean square normalisation of the unrounded sum.",
    axes=_axes(),
    inputs={
        "hidden_states": _INPUT,
        "residual": _RESIDUAL,
        "weight": _WEIGHT,
        "eps": _EPS,
    },
    outputs={"output": _INPUT_OUT, "residual_out": _RESIDUAL_OUT},
    tags=["status:verified", "fused"],
    reference=_fused_add_rmsnorm_reference,
    hints=["enable_pdl"],
)

gemma_rmsnorm_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="gemma_rmsnorm",
    description="Root mean square normalisation of each row, times one plus a weight.",
    axes=_axes(),
    inputs={"hidden_states": _INPUT, "weight": _WEIGHT, "eps": _EPS},
    outputs={"output": _OUT},
    tags=["status:verified"],
    reference=_gemma_rmsnorm_reference,
    hints=["enable_pdl"],
)

gemma_fused_add_rmsnorm_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="gemma_fused_add_rmsnorm",
    description="Residual addition, then gemma_rmsnorm of the unrounded sum.",
    axes=_axes(),
    inputs={
        "hidden_states": _INPUT,
        "residual": _RESIDUAL,
        "weight": _WEIGHT,
        "eps": _EPS,
    },
    outputs={"output": _INPUT_OUT, "residual_out": _RESIDUAL_OUT},
    tags=["status:verified", "fused"],
    reference=_gemma_fused_add_rmsnorm_reference,
    hints=["enable_pdl"],
)

layernorm_trace = TraceTemplate(
    op_type="layernorm",
    name_prefix="layernorm",
    description="Layer normalisation of each row with a float32 factor and offset per element.",
    axes=_axes(),
    inputs={"hidden_states": _INPUT, **_AFFINE, "eps": _EPS},
    outputs={"output": _RETURNED},
    tags=["status:verified"],
    reference=_layernorm_reference,
)

rmsnorm_quant_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="rmsnorm_quant",
    description="Root mean square normalisation with a saturating 8-bit float result.",
    axes=_axes(),
    inputs={"hidden_states": _INPUT, "weight": _WEIGHT, "scale": _SCALE, "eps": _EPS},
    outputs={"output": _QUANTIZED},
    tags=["status:verified", "fused", "quantize"],
    reference=_rmsnorm_quant_reference,
    hints=["enable_pdl"],
)

fused_add_rmsnorm_quant_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="fused_add_rmsnorm_quant",
    description="Residual addition, then rmsnorm_quant of the unrounded sum.",
    axes=_axes(),
    inputs={
        "hidden_states": _INPUT,
        "residual": _RESIDUAL,
        "weight": _WEIGHT,
        "scale": _SCALE,
        "eps": _EPS,
    },
    outputs={"output": _QUANTIZED, "residual_out": _RESIDUAL_OUT},
    tags=["status:verified", "fused", "quantize"],
    reference=_fused_add_rmsnorm_quant_reference,
    hints=["enable_pdl"],
)

layernorm_quant_trace = TraceTemplate(
    op_type="layernorm",
    name_prefix="layernorm_quant",
    description="Layer normalisation with a saturating 8-bit float result.",
    axes=_axes(),
    inputs={"hidden_states": _INPUT, **_AFFINE, "scale": _SCALE, "eps": _EPS},
    outputs={"output": _QUANTIZED},
    tags=["status:verified", "fused", "quantize"],
    reference=_layernorm_quant_reference,
)
