"""Norms whose kernels are written in CuTe-DSL: `norm_kernel.py`, checked as those of CUDA C++.

A kernel is compiled for one length of a row, on the first call with it. Results are those of the
functions of `flashinfer.norm`, within rounding.
"""

from typing import Any, cast

import torch

from .._common import checks
from .._common.conversions import converted
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._instrument.decorator import flashinfer_api
from ..jit.cute_dsl_norm import CuteDslNormConfig, gen_cute_dsl_norm_module
from ..trace.templates.cute_dsl_norm import (
    fused_add_rmsnorm_cute_trace,
    fused_add_rmsnorm_quant_cute_trace,
    layernorm_cute_trace,
    qk_rmsnorm_cute_trace,
    rmsnorm_cute_trace,
    rmsnorm_quant_cute_trace,
)


def _table(*, subtract_mean: bool = False, add_residual: bool = False) -> KernelTable:
    def get_kernel(
        dtype: torch.dtype, out_dtype: torch.dtype, hidden: int, weight_bias: float
    ) -> Kernel:
        config = CuteDslNormConfig(dtype, out_dtype, hidden, subtract_mean, add_residual)
        module = gen_cute_dsl_norm_module(config).build_and_load()
        return cast(Kernel, module.gemma_norm if weight_bias else module.norm)

    return KernelTable(get_kernel)


_rmsnorm = _table()
_fused_add_rmsnorm = _table(add_residual=True)
_layernorm = _table(subtract_mean=True)


def _kernel(
    table: KernelTable, input: torch.Tensor, out: torch.Tensor, weight_bias: float = 0.0
) -> Kernel:
    """The kernel for rows of these tensors; `weight_bias` is 0 or 1."""
    try:
        return cast(Kernel, table[input.dtype, out.dtype, input.shape[-1], weight_bias])
    except (*NOT_LOADED, TypeError, IndexError):  # no tensor, no number, a scalar
        checks.tensors(input=input, out=out)
        if input.ndim == 0:
            raise ValueError("`input` must have 2 to 3 dimensions, got shape []") from None
        if checks.number("weight_bias", weight_bias) not in (0, 1):
            raise ValueError(f"`weight_bias` must be 0 or 1, got {weight_bias!r}") from None
        parts: tuple[Any, ...] = (input.shape[-1], float(weight_bias))
        return cast(Kernel, table.load(*parts, input=input, out=out))


@flashinfer_api(trace=rmsnorm_cute_trace)
def rmsnorm_cute(
    input: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool | None = False,
) -> None:
    """RMS norm: ``out = input / sqrt(mean(input^2) + eps) * (weight + weight_bias)``.

    Parameters
    ----------
    input : torch.Tensor
        ``[batch, hidden]`` or ``[batch, heads, head_dim]``, float16, bfloat16 or float32. A row has
        a multiple of 16 bytes, of at most 256 KiB, and starts at one.
    weight : torch.Tensor
        ``[hidden]`` (or ``[head_dim]``), contiguous, dtype of `input`.
    out : torch.Tensor
        Result, shape and dtype of `input`; may be `input` itself, may not overlap it otherwise.
    eps : float
        Added to the mean square; finite, not negative.
    weight_bias : float
        0, or 1 for Gemma's checkpoints, which store the weight minus one.
    enable_pdl : bool, optional
        As for `flashinfer.rmsnorm`.

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor, or a number not a number.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above.
    RuntimeError
        If the GPU is not of compute capability 9.0.
    flashinfer.jit.JitError
        If the kernel is neither in the cache nor prebuilt, and nvidia-cutlass-dsl is not installed.

    Examples
    --------
    >>> x = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda")
    >>> w = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    >>> flashinfer.cute_dsl.rmsnorm_cute(x, w, x)
    """
    _kernel(_rmsnorm, input, out, weight_bias)(out, input, weight, eps, enable_pdl)


@flashinfer_api(trace=qk_rmsnorm_cute_trace)
def qk_rmsnorm_cute(
    input: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool | None = False,
) -> None:
    """RMS norm of each head of queries or keys, ``[batch, heads, head_dim]``.

    `output` is the `out` of `rmsnorm_cute`, which says the rest. Tokens and heads may be strided,
    as the queries in the output of a joint projection are.
    """
    checks.tensor("input", input, 3)
    _kernel(_rmsnorm, input, output, weight_bias)(output, input, weight, eps, enable_pdl)


@flashinfer_api(trace=rmsnorm_quant_cute_trace)
def rmsnorm_quant_cute(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool | None = False,
) -> None:
    """RMS norm with an 8-bit result: ``out = saturate(rmsnorm(input) / scale)``.

    Parameters
    ----------
    out : torch.Tensor
        Result, shape of `input`, float8_e4m3fn or float8_e5m2; a row starts at a multiple of as
        many elements as 16 bytes of `input` have.
    scale : float or torch.Tensor
        As for `flashinfer.rmsnorm_quant`.
    input, weight, eps, weight_bias, enable_pdl
        As for `rmsnorm_cute`, which also lists the errors.
    """
    kernel = _kernel(_rmsnorm, input, out, weight_bias)
    arguments = (out, input, weight, scale, eps, enable_pdl)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, {3: torch.float32}))


@flashinfer_api(trace=fused_add_rmsnorm_cute_trace)
def fused_add_rmsnorm_cute(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool | None = False,
) -> None:
    """Residual sum and RMS norm in place: ``residual += input``, ``input = rmsnorm(residual)``.

    The norm is of the sum before it is rounded.

    Parameters
    ----------
    input, residual : torch.Tensor
        As `input` of `rmsnorm_cute`, of one shape and dtype. Overwritten with the norm and the sum;
        they may not share memory.
    weight, eps, weight_bias, enable_pdl
        As for `rmsnorm_cute`, which also lists the errors.
    """
    kernel = _kernel(_fused_add_rmsnorm, input, input, weight_bias)
    kernel(input, residual, weight, eps, enable_pdl)


@flashinfer_api(trace=fused_add_rmsnorm_quant_cute_trace)
def fused_add_rmsnorm_quant_cute(
    out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: float | torch.Tensor,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    enable_pdl: bool | None = False,
) -> None:
    """Residual sum in place and RMS norm of the unrounded sum with an 8-bit result.

    Parameters
    ----------
    out, scale
        As for `rmsnorm_quant_cute`.
    input, residual, weight, eps, weight_bias, enable_pdl
        As for `fused_add_rmsnorm_cute`; `input` is not changed.
    """
    kernel = _kernel(_fused_add_rmsnorm, input, out, weight_bias)
    arguments = (out, input, residual, weight, scale, eps, enable_pdl)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, {4: torch.float32}))


@flashinfer_api(trace=layernorm_cute_trace)
def layernorm_cute(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = False,
) -> None:
    """Layer norm: ``out = (input - mean) / sqrt(var + eps) * gemma + beta``, biased variance.

    Parameters
    ----------
    out, input, eps, enable_pdl
        As for `rmsnorm_cute`, which also lists the errors.
    gemma, beta : torch.Tensor
        Weight and bias, ``[hidden]`` (or ``[head_dim]``), contiguous, float32.
    """
    _kernel(_layernorm, input, out)(out, input, gemma, beta, eps, enable_pdl)
