"""Gated activations: ``out = act(input[..., :d]) * input[..., d:]``."""

from typing import Any, cast

import torch

from ._common import checks
from ._common.kernels import NOT_LOADED, Kernel, KernelTable
from ._instrument.decorator import flashinfer_api
from .jit.activation import gen_act_and_mul_module
from .quantization.grouped import silu_and_mul_scaled_nvfp4_experts_quantize
from .trace.templates.activation import (
    gelu_and_mul_trace,
    gelu_tanh_and_mul_trace,
    silu_and_mul_trace,
)

__all__ = [
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "get_act_and_mul_module",
    "silu_and_mul",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
]


def get_act_and_mul_module(act_func_name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The loaded module of one activation (``silu``, ``gelu`` or ``gelu_tanh``) and dtype."""
    return gen_act_and_mul_module(act_func_name, dtype).build_and_load()


def _table(act_func_name: str) -> KernelTable:
    return KernelTable(
        lambda dtype: cast(Kernel, get_act_and_mul_module(act_func_name, dtype).act_and_mul)
    )


_silu = _table("silu")
_gelu = _table("gelu")
_gelu_tanh = _table("gelu_tanh")


def _new_output(input: torch.Tensor) -> torch.Tensor:
    checks.tensor("input", input)
    if input.ndim == 0:
        raise ValueError("`input` must have at least 1 dimension, got a scalar")
    return input.new_empty(*input.shape[:-1], input.shape[-1] // 2)


@flashinfer_api(trace=silu_and_mul_trace)
def silu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """SwiGLU's gate: ``out = silu(input[..., :d]) * input[..., d:]``.

    ``silu(x) = x / (1 + exp(-x))``.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., 2 * d]``, float16, bfloat16 or float32. The last dimension is contiguous and the
        leading ones fold into one (a contiguous tensor, or a column slice of one).
    out : torch.Tensor, optional
        Result, ``[..., d]``, dtype of `input`, strides as for `input`. May not overlap `input`.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the device has it. Changes no result.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor. Computed in float32 and rounded once; 16-bit dtypes use the
        approximate exponential (relative error below 2^-20).

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above.

    Notes
    -----
    N. Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if out is None:
        out = _new_output(input)
    try:
        kernel = _silu[input.dtype]
    except NOT_LOADED:
        kernel = _silu.load(input=input)
    kernel(out, input, enable_pdl)
    return out


@flashinfer_api(trace=gelu_and_mul_trace)
def gelu_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """GEGLU's gate: ``out = gelu(input[..., :d]) * input[..., d:]``, ``gelu(x) = x * Phi(x)``.

    Phi is the normal distribution function (the exact form, by erfc). Arguments, result and errors
    as for `silu_and_mul`.
    """
    if out is None:
        out = _new_output(input)
    try:
        kernel = _gelu[input.dtype]
    except NOT_LOADED:
        kernel = _gelu.load(input=input)
    kernel(out, input, enable_pdl)
    return out


@flashinfer_api(trace=gelu_tanh_and_mul_trace)
def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """GEGLU's gate with the tanh form of gelu.

    ``gelu(x) = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``. Arguments, result and errors as
    for `silu_and_mul`.
    """
    if out is None:
        out = _new_output(input)
    try:
        kernel = _gelu_tanh[input.dtype]
    except NOT_LOADED:
        kernel = _gelu_tanh.load(input=input)
    kernel(out, input, enable_pdl)
    return out
