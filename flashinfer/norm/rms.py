"""RMS norm and layer norm, with the residual sum before and the cast to 8 bits after."""

from typing import cast

import torch

from .._common.conversions import converted
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._instrument.decorator import flashinfer_api
from ..jit.norm import NormConfig, gen_norm_module
from ..trace.templates.norm import (
    fused_add_rmsnorm_quant_trace,
    fused_add_rmsnorm_trace,
    gemma_fused_add_rmsnorm_trace,
    gemma_rmsnorm_trace,
    layernorm_quant_trace,
    layernorm_trace,
    rmsnorm_quant_trace,
    rmsnorm_trace,
)


def _table(
    function: str = "norm", *, subtract_mean: bool = False, add_residual: bool = False
) -> KernelTable:
    def get_kernel(dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> Kernel:
        config = NormConfig(dtype, out_dtype or dtype, subtract_mean, add_residual)
        module = gen_norm_module(config).build_and_load()
        return cast(Kernel, getattr(module, function))

    return KernelTable(get_kernel)


_rmsnorm = _table()
_gemma_rmsnorm = _table("gemma_norm")
_fused_add_rmsnorm = _table(add_residual=True)
_gemma_fused_add_rmsnorm = _table("gemma_norm", add_residual=True)
_layernorm = _table(subtract_mean=True)


@flashinfer_api(trace=rmsnorm_trace)
def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Root mean square norm: ``out = input / sqrt(mean(input^2) + eps) * weight``.

    Parameters
    ----------
    input : torch.Tensor
        ``[batch, hidden]`` or ``[batch, heads, head_dim]``, float16, bfloat16 or float32, last
        dimension contiguous.
    weight : torch.Tensor
        ``[hidden]`` (or ``[head_dim]``), contiguous, dtype of `input`.
    eps : float
        Added to the mean square; finite, not negative.
    out : torch.Tensor, optional
        Result, shape and dtype of `input`; may be `input` itself, may not overlap it otherwise.
    enable_pdl : bool, optional
        Programmatic dependent launch: the kernel may be scheduled before the previous one in
        the stream ends (it still waits for its data). None: where the device has it (compute
        capability 9.0 and later).

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor.

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor, or a number not a number.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above.

    Notes
    -----
    B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019. Squares are summed in
    float32: a row with elements beyond about 1e19 gives zeros, as its mean square is infinite.

    Examples
    --------
    >>> x = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda")
    >>> w = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    >>> flashinfer.rmsnorm(x, w).shape
    torch.Size([16, 4096])
    """
    if out is None:
        out = torch.empty_like(input)
    try:
        kernel = _rmsnorm[input.dtype]
    except NOT_LOADED:
        kernel = _rmsnorm.load(input=input)
    kernel(out, input, weight, eps, enable_pdl)
    return out


@flashinfer_api(trace=gemma_rmsnorm_trace)
def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Gemma's RMS norm: ``out = input / sqrt(mean(input^2) + eps) * (weight + 1)``.

    The sum ``weight + 1`` is formed in float32. Arguments, result and errors as for `rmsnorm`.
    """
    if out is None:
        out = torch.empty_like(input)
    try:
        kernel = _gemma_rmsnorm[input.dtype]
    except NOT_LOADED:
        kernel = _gemma_rmsnorm.load(input=input)
    kernel(out, input, weight, eps, enable_pdl)
    return out


@flashinfer_api(trace=fused_add_rmsnorm_trace)
def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Residual sum and RMS norm in place.

    ``s = input + residual`` in float32; then ``residual = s`` rounded, and
    ``input = s / sqrt(mean(s^2) + eps) * weight`` from the unrounded sum.

    Parameters
    ----------
    input : torch.Tensor
        ``[batch, hidden]`` or ``[batch, heads, head_dim]``, float16, bfloat16 or float32, last
        dimension contiguous. Overwritten with the norm.
    residual : torch.Tensor
        Shape and dtype of `input`. Overwritten with the sum. May not share memory with `input`.
    weight, eps, enable_pdl
        As for `rmsnorm`, which also lists the errors.
    """
    try:
        kernel = _fused_add_rmsnorm[input.dtype]
    except NOT_LOADED:
        kernel = _fused_add_rmsnorm.load(input=input)
    kernel(input, residual, weight, eps, enable_pdl)


@flashinfer_api(trace=gemma_fused_add_rmsnorm_trace)
def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """`fused_add_rmsnorm` with ``weight + 1`` in place of `weight`, as Gemma has it."""
    try:
        kernel = _gemma_fused_add_rmsnorm[input.dtype]
    except NOT_LOADED:
        kernel = _gemma_fused_add_rmsnorm.load(input=input)
    kernel(input, residual, weight, eps, enable_pdl)


@flashinfer_api(trace=rmsnorm_quant_trace)
def rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """RMS norm with an 8-bit result: ``out = saturate(rmsnorm(input) / scale)``.

    Parameters
    ----------
    out : torch.Tensor
        Result, shape of `input`, float8_e4m3fn or float8_e5m2, last dimension contiguous. Values
        beyond the largest finite one become that one; NaN stays NaN.
    input, weight, eps, enable_pdl
        As for `rmsnorm`, which also lists the errors.
    scale : float or torch.Tensor
        Dequantisation scale: ``out * scale`` approximates the norm. Positive and finite. A tensor
        has one element on the device of `input`, float32 or a floating dtype that is converted; its
        value is not checked.
    """
    try:
        kernel = _rmsnorm[input.dtype, out.dtype]
    except NOT_LOADED:
        kernel = _rmsnorm.load(input=input, out=out)
    arguments = (out, input, weight, scale, eps, enable_pdl)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, {3: torch.float32}))


@flashinfer_api(trace=fused_add_rmsnorm_quant_trace)
def fused_add_rmsnorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Residual sum in place and RMS norm with an 8-bit result.

    ``s = input + residual`` in float32; then ``residual = s`` rounded, and
    ``out = saturate(s / sqrt(mean(s^2) + eps) * weight / scale)``. `input` is not changed.

    Parameters
    ----------
    out, scale
        As for `rmsnorm_quant`.
    input, residual, weight, eps, enable_pdl
        As for `fused_add_rmsnorm`.
    """
    try:
        kernel = _fused_add_rmsnorm[input.dtype, out.dtype]
    except NOT_LOADED:
        kernel = _fused_add_rmsnorm.load(input=input, out=out)
    arguments = (out, input, residual, weight, scale, eps, enable_pdl)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, {4: torch.float32}))


@flashinfer_api(trace=layernorm_trace)
def layernorm(
    input: torch.Tensor, gemma: torch.Tensor, beta: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """Layer norm: ``(input - mean) / sqrt(var + eps) * gemma + beta``, with the biased variance.

    Parameters
    ----------
    input : torch.Tensor
        ``[batch, hidden]`` or ``[batch, heads, head_dim]``, float16, bfloat16 or float32, last
        dimension contiguous.
    gemma, beta : torch.Tensor
        Weight and bias, ``[hidden]`` (or ``[head_dim]``), contiguous, float32.
    eps : float
        Added to the variance; finite, not negative.

    Returns
    -------
    torch.Tensor
        Shape and dtype of `input`.

    Raises
    ------
    TypeError, ValueError
        As for `rmsnorm`.

    Notes
    -----
    J. Ba, J. Kiros and G. Hinton, "Layer Normalization", 2016. The variance is summed from centred
    values (two passes over registers), so a large mean costs no accuracy.
    """
    out = torch.empty_like(input)
    try:
        kernel = _layernorm[input.dtype]
    except NOT_LOADED:
        kernel = _layernorm.load(input=input)
    kernel(out, input, gemma, beta, eps, None)
    return out


@flashinfer_api(trace=layernorm_quant_trace)
def layernorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
) -> None:
    """Layer norm with an 8-bit result: ``out = saturate(layernorm(input) / scale)``.

    Parameters
    ----------
    out, scale
        As for `rmsnorm_quant`.
    input, gemma, beta, eps
        As for `layernorm`.
    """
    try:
        kernel = _layernorm[input.dtype, out.dtype]
    except NOT_LOADED:
        kernel = _layernorm.load(input=input, out=out)
    arguments = (out, input, gemma, beta, scale, eps, None)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, {4: torch.float32}))
