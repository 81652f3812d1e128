"""A pattern and its tensors become one call of the kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._common import checks
from ..compat.backends import BackendSupportedError
from . import all_reduce_call
from .fusion_names import AllReduceFusionPattern as Pattern
from .fusion_names import QuantizationSFLayout
from .peer_workspace import PeerWorkspace

_FP8 = {
    Pattern.kARResidualRMSNormFP8Quant,
    Pattern.kARResidualRMSNormOutFP8Quant,
    Pattern.kMoEFinalizeARResidualRMSNormFP8Quant,
}
_FP4 = {Pattern.kARResidualRMSNormFP4Quant, Pattern.kARResidualRMSNormOutFP4Quant}
_ROW_FP8 = {Pattern.kARResidualRMSNormDynamicFP8Quant, Pattern.kARResidualRMSNormOutDynamicFP8Quant}
_KEEPS_NORM = {
    Pattern.kARResidualRMSNorm,
    Pattern.kARResidualRMSNormOutFP8Quant,
    Pattern.kARResidualRMSNormOutFP4Quant,
    Pattern.kARResidualRMSNormOutDynamicFP8Quant,
    Pattern.kMoEReductionARResidualRMSNorm,
    Pattern.kMoEFinalizeARResidualRMSNorm,
}
# The kernels of the others have not run on a GPU.
_SERVED = {Pattern.kAllReduce, Pattern.kARResidualRMSNorm}
_LAYOUTS = {
    QuantizationSFLayout.SWIZZLED_128x4: "nvfp4_128x4",
    QuantizationSFLayout.SWIZZLED_8x4: "nvfp4_8x4",
    QuantizationSFLayout.LINEAR: "nvfp4_linear",
}


class Outputs(NamedTuple):
    """Tensors that a call writes, those made here included."""

    output: torch.Tensor | None
    residual_out: torch.Tensor | None
    norm_out: torch.Tensor | None
    quant_out: torch.Tensor | None
    scale_out: torch.Tensor | None


class Launch(NamedTuple):
    """How the kernel is launched."""

    use_oneshot: bool | None
    enable_pdl: bool
    completes_at_end: bool


def pattern_of(value: Any) -> Pattern:
    """The pattern; refuses an unknown one and one that is not served."""
    try:
        pattern = Pattern(value)
    except ValueError:
        raise ValueError(f"`pattern` must be an AllReduceFusionPattern, got {value!r}") from None
    if pattern not in _SERVED:
        raise BackendSupportedError(
            f"`pattern` {pattern.name} is not served yet: take kARResidualRMSNorm, and quantise or "
            "sum experts in calls of their own"
        )
    return pattern


def scale_bytes(rows: int, columns: int, layout: QuantizationSFLayout) -> int:
    """Bytes of NVFP4's scales for ``[rows, columns]`` elements, padding included."""
    groups = columns // 16
    if layout == QuantizationSFLayout.LINEAR:
        return rows * groups
    tile = 128 if layout == QuantizationSFLayout.SWIZZLED_128x4 else 8
    return -(-rows // tile) * tile * (-(-groups // 4) * 4)


def fused(
    workspace: PeerWorkspace,
    input: torch.Tensor,
    pattern: Pattern,
    outputs: Outputs,
    residual_in: torch.Tensor | None,
    rms_gamma: torch.Tensor | None,
    *,
    eps: float,
    weight_bias: float,
    scale: torch.Tensor | float | None,
    layout: Any,
    launch: Launch,
    source: str = "tensor",
    moe: tuple[Any, ...] | None = None,
) -> Outputs:
    """A pattern with a norm."""
    rows = checks.tensor("residual_in", residual_in, 2)
    gamma = checks.tensor("rms_gamma", rms_gamma, 1)
    layout = QuantizationSFLayout(QuantizationSFLayout.SWIZZLED_128x4 if layout is None else layout)
    outputs = _made(pattern, outputs, rows, layout)
    result = "norm"
    if pattern in _FP8 | _ROW_FP8 | _FP4:
        if rows.dtype == torch.float32:
            raise ValueError("`residual_in` must be float16 or bfloat16 where codes are written")
        result = "static_e4m3" if pattern in _FP8 else "row_e4m3"
        if pattern in _FP4:
            result = _LAYOUTS[layout]
        if pattern not in _ROW_FP8 and scale is None:
            raise ValueError(f"`scale_factor` is needed by {pattern.name}, got None")
    if isinstance(scale, torch.Tensor):
        scale = scale.reshape(1)
    norm = all_reduce_call.Norm(
        rows,
        gamma,
        outputs.residual_out,
        outputs.norm_out,
        outputs.quant_out,
        outputs.scale_out,
        1.0 if scale is None else scale,
        eps,
        weight_bias,
    )
    all_reduce_call.run(
        workspace,
        input,
        outputs.output,
        norm,
        source=source,
        result=result,
        moe=moe,
        use_oneshot=launch.use_oneshot,
        enable_pdl=launch.enable_pdl,
        completes_at_end=launch.completes_at_end,
    )
    return outputs


def _made(
    pattern: Pattern, given: Outputs, rows: torch.Tensor, layout: QuantizationSFLayout
) -> Outputs:
    """The outputs of the pattern; makes those that are None."""
    norm_out, quant_out, scale_out = given.norm_out, given.quant_out, given.scale_out
    if norm_out is None and pattern in _KEEPS_NORM:
        norm_out = torch.empty_like(rows)
    if quant_out is None and pattern in _FP8 | _ROW_FP8:
        quant_out = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    if pattern in _FP4:
        if quant_out is None:
            shape = (rows.shape[0], rows.shape[1] // 2)
            quant_out = torch.empty(shape, dtype=torch.uint8, device=rows.device)
        if scale_out is None:
            count = scale_bytes(rows.shape[0], rows.shape[1], layout)
            scale_out = torch.zeros(count, dtype=torch.uint8, device=rows.device)
    if scale_out is None and pattern in _ROW_FP8:
        scale_out = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    residual_out = given.residual_out if given.residual_out is not None else torch.empty_like(rows)
    return Outputs(given.output, residual_out, norm_out, quant_out, scale_out)
