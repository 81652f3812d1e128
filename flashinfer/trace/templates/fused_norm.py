"""Templates and references of RMS norms, then SiLU or quantisation in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..specs import FLOATING, Axis, Const, Scalar, Tensor, Var
from ..template import TraceTemplate
from .block_scales import divide, neighbouring_codes, to_8bit

_BLOCK = 128


def _normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float64."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.double()


def _block_quantize(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes of groups of 128, and their scales column by column, padded to fours."""
    blocks = y.float().reshape(y.shape[0], y.shape[1] // 128, 128)
    scale = divide(blocks.abs().amax(-1).clamp(min=1e-4), 448.0)
    codes = to_8bit(blocks / scale[..., None], torch.float8_e4m3fn)
    columns = scale.new_zeros(scale.shape[1], -(-y.shape[0] // 4) * 4)
    columns[:, : y.shape[0]] = scale.t()
    return codes.reshape(y.shape), columns


def _fused_add_rmsnorm_fp8_block_quant_reference(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """s = input + residual; y = rmsnorm(s) * weight, rounded; out = y / scale of 128 elements.

    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019; DeepSeek-AI,
    "DeepSeek-V3 Technical Report", 2024, section 3.3.
    """
    total = input.double() + residual.double()
    normed = _normalize(total, weight, eps)
    codes, scales = _block_quantize(normed.to(input.dtype))
    return codes, scales, normed, total


def _rmsnorm_fp8_block_quant_reference(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = rmsnorm(input) * weight, rounded; out = y / scale of 128 elements.

    Source: as fused_add_rmsnorm_fp8_block_quant.
    """
    return _block_quantize(_normalize(input.double(), weight, eps).to(input.dtype))


def _fused_rmsnorm_silu_reference(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """y = rmsnorm(input) * weight; out = y / (1 + exp(-y)), limited to the range of 8 bits.

    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019; S. Elfwing et al.,
    "Sigmoid-Weighted Linear Units", 2018.
    """
    y = _normalize(input.double(), weight, eps)
    result = y * torch.sigmoid(y)
    if out is not None and out.dtype == torch.float8_e4m3fn:
        result = result.clamp(-448, 448)
    return result


def _close(expected: Any, actual: Any) -> bool:
    """Codes near those of the reference, scales in columns; what is not quantised, by its dtype."""
    from ..check import default_check

    codes, columns, *others = expected
    actual_codes, actual_columns, *actual_others = actual
    rows = codes.shape[0]
    if columns.shape != actual_columns.shape or not bool((actual_columns[:, rows:] == 0).all()):
        return False
    scale, actual_scale = columns[:, :rows].t(), actual_columns[:, :rows].t()
    if not neighbouring_codes((codes, scale), (actual_codes, actual_scale)):
        return False
    return default_check(tuple(others), tuple(actual_others), min_cos_sim=None)


_ROWS = ["batch_size", "hidden_size"]
_EPS = Scalar(minimum=0, description="Added to the mean square under the root.")
_COLUMNS = ["num_blocks", "padded_batch"]


def _num_blocks(sizes: Mapping[str, int]) -> int:
    return sizes["hidden_size"] // _BLOCK


def _axes() -> dict[str, Axis]:
    return {
        "batch_size": Var("Rows that are normalised."),
        "hidden_size": Const("Elements of a row.", abbrev="h"),
    }


def _block_axes() -> dict[str, Axis]:
    return _axes() | {
        "num_blocks": Const("Scales of a row.", abbrev="", derive=_num_blocks),
        "padded_batch": Var("Rows, rounded up to a multiple of four.", from_values=True),
    }


def _rows(**properties: Any) -> Tensor:
    return Tensor(_ROWS, layout="rows", **properties)


def _destinations(arguments: dict[str, Any]) -> dict[str, Any]:
    """An example call: rows of whole blocks, and tensors for the results."""
    input = torch.cat([arguments["input"]] * _BLOCK, dim=-1)
    rows, hidden_size = input.shape
    wide = {
        name: torch.cat([arguments[name]] * _BLOCK, dim=-1)
        for name in ("residual", "weight")
        if name in arguments
    }
    scales = input.new_zeros(hidden_size // _BLOCK, -(-rows // 4) * 4, dtype=torch.float32)
    made = {
        "input": input,
        "out": torch.zeros_like(input, dtype=torch.float8_e4m3fn),
        "block_scale": scales,
        "normed_out": torch.zeros_like(input),
    }
    return arguments | {k: v for k, v in made.items() if k in arguments} | wide


_INPUT = _rows(param="input", dtypes=FLOATING)
_RESIDUAL = _rows(dtype_from="hidden_states")
_WEIGHT = Tensor(["hidden_size"], dtype_from="hidden_states", layout="rows")
_CODES = _rows(param="out", dtype="float8_e4m3fn", description="Quantised result.")
_SCALES = Tensor(
    _COLUMNS,
    param="block_scale",
    dtype="float32",
    description="Scales, column by column.",
    layout="rows",
)

fused_add_rmsnorm_fp8_block_quant_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="fused_add_rmsnorm_fp8_block_quant",
    description="Residual addition, RMS norm, and E4M3 codes with a scale per 128 elements.",
    axes=_block_axes(),
    inputs={"hidden_states": _INPUT, "residual": _RESIDUAL, "weight": _WEIGHT, "eps": _EPS},
    outputs={
        "output": _CODES,
        "block_scale": _SCALES,
        "normed": _rows(param="normed_out", dtype_from="hidden_states", in_place_of="input"),
        "residual_out": _rows(param="residual", dtype_from="residual"),
    },
    constraints=["hidden_size % 128 == 0"],
    tags=["status:verified", "fused", "quantize"],
    reference=_fused_add_rmsnorm_fp8_block_quant_reference,
    check=_close,
    init=_destinations,
    hints=["enable_pdl"],
)

rmsnorm_fp8_block_quant_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="rmsnorm_fp8_block_quant",
    description="RMS norm, and E4M3 codes of it with a scale per 128 elements.",
    axes=_block_axes(),
    inputs={"hidden_states": _INPUT, "weight": _WEIGHT, "eps": _EPS},
    outputs={"output": _CODES, "block_scale": _SCALES},
    constraints=["hidden_size % 128 == 0"],
    tags=["status:verified", "fused", "quantize"],
    reference=_rmsnorm_fp8_block_quant_reference,
    check=_close,
    init=_destinations,
    hints=["enable_pdl"],
)


fused_rmsnorm_silu_trace = TraceTemplate(
    op_type="rmsnorm",
    name_prefix="fused_rmsnorm_silu",
    description="RMS norm, then SiLU.",
    axes=_axes(),
    inputs={"hidden_states": _INPUT, "weight": _WEIGHT, "eps": _EPS},
    outputs={
        "output": _rows(
            param="out",
            dtypes=(*FLOATING, "float8_e4m3fn"),
            dtype_from="hidden_states",
            in_place_of="input",
        )
    },
    tags=["status:verified", "fused"],
    reference=_fused_rmsnorm_silu_reference,
    options={"block_scale": (None,)},
)
