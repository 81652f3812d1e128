"""RMS norm, then SiLU or quantisation in blocks; `flashinfer.norm` exports it."""

from typing import cast

import torch

from .._common import checks
from .._common.dtypes import FLOAT, check_dtype, torch_name
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._instrument.decorator import flashinfer_api
from ..jit.fused_rmsnorm import FusedRmsnormConfig, gen_fused_rmsnorm_module
from ..trace.templates.fused_norm import (
    fused_add_rmsnorm_fp8_block_quant_trace,
    fused_rmsnorm_silu_trace,
    rmsnorm_fp8_block_quant_trace,
)


def _get_kernel(dtype: torch.dtype, output: str, add_residual: bool, silu: bool) -> Kernel:
    config = FusedRmsnormConfig(dtype, output, add_residual, silu)
    return cast(Kernel, gen_fused_rmsnorm_module(config).build_and_load().fused_rmsnorm)


_kernels = KernelTable(_get_kernel)


def _kernel(input: torch.Tensor, output: str, add_residual: bool, silu: bool) -> Kernel:
    try:
        return _kernels[input.dtype, output, add_residual, silu]
    except NOT_LOADED:
        return _kernels.load(output, add_residual, silu, input=input)


@flashinfer_api(trace=fused_add_rmsnorm_fp8_block_quant_trace)
def fused_add_rmsnorm_fp8_block_quant(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    normed_out: torch.Tensor,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Residual sum in place, RMS norm, and its quantisation with a scale per 128 elements.

    ``s = input + residual`` in float32; then ``residual = s`` rounded, ``normed_out = s /
    sqrt(mean(s^2) + eps) * weight`` rounded, and ``out, block_scale`` are
    `per_token_group_quant_8bit` of the rounded `normed_out`, with groups of 128 and an eps of 1e-4.

    Parameters
    ----------
    out : torch.Tensor
        ``[batch, hidden]``, float8_e4m3fn; hidden is a multiple of 128.
    block_scale : torch.Tensor
        ``[hidden // 128, batch rounded up to 4]``, float32, contiguous: the scales column by
        column, ``block_scale[:, :batch].t()`` in the order of the rows. Padding becomes zero.
    normed_out : torch.Tensor
        ``[batch, hidden]``, dtype of `input`; may be `input` itself.
    input : torch.Tensor
        ``[batch, hidden]``, float16, bfloat16 or float32, last dimension contiguous. Not changed.
    residual : torch.Tensor
        Shape and dtype of `input`. Overwritten with the sum.
    weight : torch.Tensor
        ``[hidden]``, contiguous, dtype of `input`.
    eps : float
        Added to the mean square; finite, not negative.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the device has it. Changes no result.

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor, or a number not a number.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above; or
        if a row, or `weight`, does not begin on 16 bytes.

    Notes
    -----
    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3: what its block-scaled products
    read.
    """
    kernel = _kernel(input, "e4m3_blocks", True, False)
    checks.tensor("normed_out", normed_out)
    kernel(out, block_scale, normed_out, input, residual, weight, eps, enable_pdl)


@flashinfer_api(trace=rmsnorm_fp8_block_quant_trace)
def rmsnorm_fp8_block_quant(
    out: torch.Tensor,
    block_scale: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """RMS norm and its quantisation with a scale per 128 elements.

    `fused_add_rmsnorm_fp8_block_quant` without a residual and without the unquantised result;
    arguments and errors as there.
    """
    kernel = _kernel(input, "e4m3_blocks", False, False)
    kernel(out, block_scale, None, input, weight, eps, enable_pdl)


@flashinfer_api(trace=fused_rmsnorm_silu_trace)
def fused_rmsnorm_silu(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMS norm and SiLU: ``out = silu(input / sqrt(mean(input^2) + eps) * weight)``.

    Parameters
    ----------
    input : torch.Tensor
        ``[num_tokens, hidden]``, float16, bfloat16 or float32, last dimension contiguous.
    weight : torch.Tensor
        ``[hidden]``, contiguous, dtype of `input`.
    eps : float
        Added to the mean square; finite, not negative.
    out : torch.Tensor, optional
        Result, shape of `input`; its dtype is that of `input` (it may then be `input` itself) or
        float8_e4m3fn, where values beyond 448 become 448. NVFP4 results are for Blackwell and not
        supported.
    block_scale : None
        For NVFP4 results only.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor of the dtype of `input`. Computed in float32 and rounded once; 16-bit
        inputs take the approximate exponential (relative error below 2^-20).

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor, or `eps` not a number.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above; or
        if `block_scale` is given.
    """
    if block_scale is not None:
        raise ValueError(
            "`block_scale` must be None: results with block scales are not supported, got "
            f"{type(block_scale).__name__}"
        )
    if out is None:
        checks.cuda_tensors(input=input)
        out = torch.empty_like(input)
    checks.tensor("out", out)
    checks.tensor("input", input)
    check_dtype("input", input.dtype, FLOAT)
    check_dtype("out", out.dtype, (input.dtype, torch.float8_e4m3fn))
    kernel = _kernel(input, torch_name(out.dtype), False, True)
    kernel(out, input, weight, eps, None)
    return out
