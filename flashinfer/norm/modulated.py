"""Layer norms of diffusion transformers; `flashinfer.norm` and `diffusion_ops` export them."""

from typing import Any, cast

import torch

from .._common import checks
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._instrument.decorator import flashinfer_api
from ..jit.gated_norms import ModulatedLayernormConfig, gen_modulated_layernorm_module
from ..trace.templates.modulated_layernorm import (
    fused_dit_gate_residual_layernorm_gamma_beta_trace,
    fused_dit_gate_residual_layernorm_scale_shift_trace,
    fused_dit_residual_layernorm_scale_shift_trace,
)


def _get_kernel(dtype: torch.dtype, gate: bool, affine: bool) -> Kernel:
    config = ModulatedLayernormConfig(dtype, gate, affine)
    module = gen_modulated_layernorm_module(config).build_and_load()
    return cast(Kernel, module.modulated_layernorm)


_kernels = KernelTable(_get_kernel)


def _kernel(input: torch.Tensor, gate: bool, affine: bool) -> Kernel:
    try:
        return _kernels[input.dtype, gate, affine]
    except NOT_LOADED:
        return _kernels.load(gate, affine, input=input)


def _columns(bias: torch.Tensor | None) -> torch.Tensor | None:
    """``[1, hidden]`` as ``[hidden]``."""
    is_row = isinstance(bias, torch.Tensor) and bias.ndim == 2 and bias.shape[0] == 1
    return bias[0] if is_row and bias is not None else bias


def _refuse_codes(use_nvfp4: Any, use_mxfp8: Any, **others: Any) -> None:
    for name, value in (("use_nvfp4", use_nvfp4), ("use_mxfp8", use_mxfp8)):
        if checks.flag(name, value):
            raise ValueError(
                f"`{name}` must be False: quantised results are not made here, quantise `norm_out` "
                "with nvfp4_quantize or mxfp8_quantize; got True"
            )
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"`{name}` must be None without a quantised result, got {type(value).__name__}"
            )


def _results(
    input: torch.Tensor, residual_out: torch.Tensor | None, norm_out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = torch.contiguous_format
    return (
        torch.empty_like(input, memory_format=layout) if residual_out is None else residual_out,
        torch.empty_like(input, memory_format=layout) if norm_out is None else norm_out,
    )


@flashinfer_api(trace=fused_dit_gate_residual_layernorm_gamma_beta_trace)
def fused_dit_gate_residual_layernorm_gamma_beta(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: torch.Tensor | None = None,
    input_global_scaling_factor: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated residual sum and layer norm: ``h = residual + input * (gate + gate_bias)``, then
    ``(h - mean(h)) / sqrt(var(h) + epsilon) * gamma + beta``.

    Parameters
    ----------
    input, residual : torch.Tensor
        ``[batch, rows, hidden]``, float16 or bfloat16; hidden is a multiple of 8, at most 6144. The
        last dimension is contiguous and each row begins on 16 bytes, as in all tensors here.
    gate : torch.Tensor
        Shape and dtype of `input`; its strides are its own: a chunk of a wider tensor, or a row
        that is expanded over others.
    gamma, beta : torch.Tensor
        ``[hidden]``, float32: weight and bias of the norm.
    gate_bias : torch.Tensor, optional
        ``[hidden]`` or ``[1, hidden]``, float32; added to `gate`.
    epsilon : float
        Added to the variance; finite, not negative.
    use_nvfp4, use_mxfp8 : bool
        Must be False: quantised results are not made here.
    global_scaling_factor, sf_out : None
        Only quantised results would need them.
    input_global_scaling_factor : torch.Tensor, optional
        ``[1]``, float32: factor of `input`.
    residual_out, norm_out : torch.Tensor, optional
        Results, shape and dtype of `input`; the first may be `residual` or `input` itself, and so
        may the second.

    Returns
    -------
    tuple of torch.Tensor
        `residual_out`, which is ``h``, and `norm_out`. Computed in float32 and each rounded once:
        the norm is of ``h`` before it is rounded.

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor, or a number not a number.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above; or
        if a quantised result is asked for.

    Notes
    -----
    W. Peebles, S. Xie, "Scalable Diffusion Models with Transformers", 2023.
    """
    kernel = _kernel(input, True, True)
    _refuse_codes(use_nvfp4, use_mxfp8, global_scaling_factor=global_scaling_factor, sf_out=sf_out)
    checks.tensor("residual", residual)
    results = _results(input, residual_out, norm_out)
    gates = (gate, _columns(gate_bias))
    kernel(*results, input, residual, input_global_scaling_factor, gates, gamma, beta, epsilon)
    return results


@flashinfer_api(trace=fused_dit_gate_residual_layernorm_scale_shift_trace)
def fused_dit_gate_residual_layernorm_scale_shift(
    input: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    gate_bias: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: torch.Tensor | None = None,
    input_global_scaling_factor: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated residual sum and modulated layer norm.

    `fused_dit_gate_residual_layernorm_gamma_beta` whose norm ends in ``* (1 + scale + scale_bias) +
    (shift + shift_bias)``; other arguments, results and errors as there.

    Parameters
    ----------
    scale, shift : torch.Tensor
        As `gate`: ``[batch, rows, hidden]`` of any strides, dtype of `input`.
    gate_bias, scale_bias, shift_bias : torch.Tensor, optional
        ``[hidden]`` or ``[1, hidden]``, float32.
    """
    kernel = _kernel(input, True, False)
    _refuse_codes(use_nvfp4, use_mxfp8, global_scaling_factor=global_scaling_factor, sf_out=sf_out)
    checks.tensor("residual", residual)
    results = _results(input, residual_out, norm_out)
    kernel(
        *results,
        input,
        residual,
        input_global_scaling_factor,
        (gate, _columns(gate_bias)),
        scale,
        _columns(scale_bias),
        shift,
        _columns(shift_bias),
        epsilon,
    )
    return results


@flashinfer_api(trace=fused_dit_residual_layernorm_scale_shift_trace)
def fused_dit_residual_layernorm_scale_shift(
    input: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    scale_bias: torch.Tensor | None = None,
    shift_bias: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    use_nvfp4: bool = False,
    use_mxfp8: bool = False,
    global_scaling_factor: torch.Tensor | None = None,
    input_global_scaling_factor: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    sf_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual sum and modulated layer norm.

    `fused_dit_gate_residual_layernorm_scale_shift` without a gate: ``h = residual + input``, or
    `input` alone where `residual` is None. Arguments, results and errors as there.
    """
    kernel = _kernel(input, False, False)
    _refuse_codes(use_nvfp4, use_mxfp8, global_scaling_factor=global_scaling_factor, sf_out=sf_out)
    results = _results(input, residual_out, norm_out)
    kernel(
        *results,
        input,
        residual,
        input_global_scaling_factor,
        scale,
        _columns(scale_bias),
        shift,
        _columns(shift_bias),
        epsilon,
    )
    return results
