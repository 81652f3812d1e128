"""A pattern and its tensors become one call of the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
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
# Four UE8M0 exponents in a word, which only Blackwell's block-scaled products read.
_PACKED = {
    Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant,
    Pattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant,
}
_REDUCES = {Pattern.kMoEReductionARResidualRMSNorm}
_FINALIZES = {
    Pattern.kMoEFinalizeARResidualRMSNorm,
    Pattern.kMoEFinalizeARResidualRMSNormFP8Quant,
}
TAKES_EXPERTS = _REDUCES | _FINALIZES
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
    if pattern in _PACKED:
        raise BackendSupportedError(
            f"`pattern` {pattern.name} writes packed exponents, which only Blackwell's products "
            "read: take kARResidualRMSNormDynamicFP8Quant, or kARResidualRMSNorm and quantise its "
            "output in a call of its own"
        )
    return pattern


def scale_bytes(rows: int, columns: int, layout: QuantizationSFLayout) -> int:
    """Bytes of NVFP4's scales for ``[rows, columns]`` elements, padding included."""
    groups = columns // 16
    if layout == QuantizationSFLayout.LINEAR:
        return rows * groups
    tile = 128 if layout == QuantizationSFLayout.SWIZZLED_128x4 else 8
    return -(-rows // tile) * tile * (-(-groups // 4) * 4)


class Source(NamedTuple):
    """Where a rank's rows come from: a tensor, or outputs of its experts.

    `names`: what the caller calls the binding's arguments, where it calls them otherwise.
    """

    input: Any
    kind: str = "tensor"
    moe: tuple[Any, ...] | None = None
    names: Mapping[str, str] = MappingProxyType({})


def source_of(
    pattern: Pattern,
    input: Any,
    *,
    num_experts: int | None,
    scales: Any,
    active: Any,
    token_input: Any,
    permuted_rows: Any,
    weights: Any,
    shared: Any,
) -> Source:
    """The pattern's arguments that say what a rank adds."""
    if pattern in _REDUCES:
        return _reduction(num_experts, scales, active, token_input)
    if pattern in _FINALIZES:
        checks.tensor("expanded_idx_to_permuted_idx", permuted_rows, 2)
        return Source(input, "moe_finalize", (weights, permuted_rows, shared, 1.0))
    return Source(input)


def _reduction(num_experts: int | None, scales: Any, active: Any, token_input: Any) -> Source:
    active = checks.tensor("moe_reduction_active_experts_token_input", active, 3)
    scales = checks.tensor("moe_reduction_scale_input", scales, 2)
    checks.tensor("moe_reduction_token_input", token_input, 2)
    experts = active.shape[0] if num_experts is None else num_experts
    checks.count("moe_reduction_device_num_experts", experts, 1, active.shape[0])
    names = {"input": "moe_reduction_active_experts_token_input"}
    return Source(active[:experts], "moe_reduction", (scales[:experts], token_input), names)


def fused(
    workspace: PeerWorkspace,
    source: Source,
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
) -> Outputs:
    """A pattern with a norm."""
    rows = checks.tensor("residual_in", residual_in, 2)
    gamma = checks.tensor("rms_gamma", rms_gamma, 1)
    layout = layout_of(layout)
    outputs = made(pattern, outputs, rows, layout)
    result = "norm"
    if pattern in _FP8 | _ROW_FP8 | _FP4:
        result = "static_e4m3" if pattern in _FP8 else "row_e4m3"
        if pattern in _FP4:
            result = fp4_result(layout)
        if pattern not in _ROW_FP8 and scale is None:
            raise ValueError(f"`scale_factor` is needed by {pattern.name}, got None")
    norm = Norm(rows, gamma, eps, weight_bias, 1.0 if scale is None else scale)
    run_norm(workspace, source, result, outputs, norm, launch)
    return outputs


class Norm(NamedTuple):
    """Inputs of the steps after the sum."""

    residual_in: torch.Tensor
    rms_gamma: torch.Tensor
    eps: float
    weight_bias: float
    scale: torch.Tensor | float = 1.0


def layout_of(code: Any) -> QuantizationSFLayout:
    """The layout of FP4's scales; None: SWIZZLED_128x4."""
    return QuantizationSFLayout(QuantizationSFLayout.SWIZZLED_128x4 if code is None else code)


def fp4_result(layout: QuantizationSFLayout) -> str:
    """The module's output of FP4 codes with scales in that layout."""
    return _LAYOUTS[layout]


def run_norm(
    workspace: PeerWorkspace,
    source: Source,
    result: str,
    outputs: Outputs,
    norm: Norm,
    launch: Launch,
) -> None:
    """One call whose module writes `result` beside what `outputs` asks for."""
    if result != "norm" and norm.residual_in.dtype == torch.float32:
        raise ValueError("`residual_in` must be float16 or bfloat16 where codes are written")
    scale = norm.scale
    all_reduce_call.run(
        workspace,
        source.input,
        outputs.output,
        all_reduce_call.Norm(
            norm.residual_in,
            norm.rms_gamma,
            outputs.residual_out,
            outputs.norm_out,
            outputs.quant_out,
            outputs.scale_out,
            scale.reshape(1) if isinstance(scale, torch.Tensor) else scale,
            norm.eps,
            norm.weight_bias,
        ),
        source=source.kind,
        result=result,
        moe=source.moe,
        names=source.names,
        use_oneshot=launch.use_oneshot,
        enable_pdl=launch.enable_pdl,
        completes_at_end=launch.completes_at_end,
    )


def made(
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
