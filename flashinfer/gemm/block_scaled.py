"""Products of 8-bit matrices whose blocks of 128 elements have scales."""

import torch

from .._common.checks import flag as check_flag
from .._common.checks import same_device as check_same_device
from .._common.checks import tensor as check_tensor
from .._common.checks import tensors as check_tensors
from .._common.dtypes import check_dtype, torch_name
from .._instrument.decorator import flashinfer_api
from ..compat.backends import backend_requirement, supported_compute_capability
from ..quantization._kernels import SCALE_BLOCK, quantize_rows
from ..trace.templates.gated_product import fp8_blockscale_gemm_swiglu_sm90_trace
from ..trace.templates.gemm import fp8_blockscale_gemm_sm90_trace
from ._checks import check_out
from ._choice import GemmProblem
from ._launch import STARTS_EARLY, launch

_OPERANDS = (torch.float8_e4m3fn, torch.bfloat16)


@supported_compute_capability([90])
def _check_operands(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    weight_ready: bool,
) -> bool:
    check_tensors(input=input, weight=weight)
    check_flag("weight_ready", weight_ready)
    for name, operand in (("input", input), ("weight", weight)):
        if operand.dtype not in _OPERANDS:
            raise ValueError(
                f"`{name}` must be FP8 (float8_e4m3fn) or BF16, got {torch_name(operand.dtype)}"
            )
        if operand.ndim != 2 or not operand.is_contiguous():
            raise ValueError(
                f"`{name}` must be a contiguous matrix, got shape {list(operand.shape)} and "
                f"strides {list(operand.stride())}"
            )
    (m, k), n = input.shape, weight.shape[0]
    if weight.shape[1] != k:
        raise ValueError(f"`weight` must have shape [n, {k}] for `input`, got {[*weight.shape]}")
    if k == 0 or k % SCALE_BLOCK:
        raise ValueError(f"`input` must have a k that is divisible by block size 128, got {k}")
    if n == 0 or n % 16:
        raise ValueError(f"`weight` must have an n that is a multiple of 16, got {n}")
    if input.dtype != torch.bfloat16 and weight.dtype == torch.bfloat16:
        raise ValueError("FP8 input with a BF16 weight is not supported: quantise `weight`")
    _check_scale("input", input, input_scale, [(m, k // SCALE_BLOCK)])
    blocks = (-(-n // SCALE_BLOCK), k // SCALE_BLOCK)
    _check_scale("weight", weight, weight_scale, [blocks, (n, k // SCALE_BLOCK)])
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"`out_dtype` must be a torch.dtype, got {type(out_dtype).__name__}")
    check_dtype("out_dtype", out_dtype or torch.bfloat16, (torch.bfloat16,))
    check_out(out, (m, n), torch.bfloat16)
    check_same_device(
        input=input, weight=weight, input_scale=input_scale, weight_scale=weight_scale, out=out
    )
    return True


def _check_scale(
    name: str, operand: torch.Tensor, scale: torch.Tensor | None, shapes: list[tuple[int, int]]
) -> None:
    """Messages begin as callers of FlashInfer match them."""
    if operand.dtype == torch.bfloat16:
        if scale is not None:
            raise ValueError(
                f"{name}_scale should not be provided for BF16 `{name}`, which is quantised here"
            )
        return
    if scale is None:
        raise ValueError(f"{name}_scale is required when {name} is FP8, got None")
    check_tensor(f"{name}_scale", scale)
    if scale.dtype != torch.float32:
        raise ValueError(f"{name}_scale must be float32, got {torch_name(scale.dtype)}")
    if tuple(scale.shape) in shapes:
        return
    allowed = " or ".join(str(list(shape)) for shape in shapes)
    hint = f"; pass {name}_scale.T" if tuple(scale.shape)[::-1] in shapes else ""
    raise ValueError(
        f"{name}_scale shape mismatch: must be {allowed}, got {list(scale.shape)}{hint}"
    )


@backend_requirement({}, common_check=_check_operands)
@flashinfer_api(trace=fp8_blockscale_gemm_sm90_trace)
def fp8_blockscale_gemm_sm90(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    weight_ready: bool = False,
) -> torch.Tensor:
    """``out = input @ weight.T`` in 8 bits, with scales of blocks of 128 elements along k.

    Every row of `input` has a scale for each 128 elements; `weight` has one for each block of 128
    rows by 128 elements, or one for each row and 128 elements. Sums of a block are multiplied by
    both scales in float32. A bfloat16 operand is quantised here first, in groups of 128 elements of
    a row, as `per_token_group_quant_8bit` does it.

    Parameters
    ----------
    input : torch.Tensor
        ``[m, k]``, float8_e4m3fn or bfloat16, contiguous, on a Hopper GPU; k is a multiple of 128.
    weight : torch.Tensor
        ``[n, k]``, float8_e4m3fn, or bfloat16 beside a bfloat16 `input`, contiguous; n is a
        multiple of 16.
    input_scale : torch.Tensor, optional
        ``[m, k / 128]``, float32, any strides (column-major scales are read as they are): what the
        elements of `input` are multiplied by. Required for, and only for, an 8-bit `input`.
    weight_scale : torch.Tensor, optional
        ``[ceil(n / 128), k / 128]`` or ``[n, k / 128]``, float32, any strides. Required for, and
        only for, an 8-bit `weight`.
    out : torch.Tensor, optional
        ``[m, n]``, bfloat16, contiguous: receives the result.
    out_dtype : torch.dtype, optional
        bfloat16, also if None.
    weight_ready : bool
        Whether what wrote `weight` had ended when the kernel before this call began, as with
        weights of a model: they are then loaded while that one runs. Changes no result.

    Returns
    -------
    torch.Tensor
        ``[m, n]``, bfloat16; `out` if it was given.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.

    Notes
    -----
    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.

    Examples
    --------
    >>> x = torch.randn(16, 256, dtype=torch.bfloat16, device="cuda")
    >>> w = torch.randn(384, 256, device="cuda").to(torch.float8_e4m3fn)
    >>> scale = torch.ones(3, 2, device="cuda")
    >>> flashinfer.gemm.fp8_blockscale_gemm_sm90(x, w, weight_scale=scale).shape
    torch.Size([16, 384])
    """
    if out is None:
        out = torch.empty(
            input.shape[0], weight.shape[0], dtype=torch.bfloat16, device=input.device
        )
    if out.numel() == 0:
        return out
    # The quantisation of `input` lets the product begin at once, or when everything before it has
    # finished.
    rounds_weight = weight.dtype == torch.bfloat16
    starts_early = not rounds_weight and (weight_ready or input.dtype == torch.bfloat16)
    if input.dtype == torch.bfloat16:
        launches_early = weight_ready and not rounds_weight
        input, input_scale = quantize_rows(input, column_major=True, launches_early=launches_early)
    if rounds_weight:
        weight, weight_scale = quantize_rows(weight, column_major=True)
    assert input_scale is not None and weight_scale is not None
    by_row = weight_scale.shape[0] == weight.shape[0]
    problem = GemmProblem(
        input.dtype,
        weight.dtype,
        torch.bfloat16,
        rows=input.shape[0],
        columns=weight.shape[0],
        k=weight.shape[1],
        scale="group" if by_row else "block",
    )
    scales = input_scale, weight_scale
    layout = STARTS_EARLY if starts_early else 0
    return launch(problem, "input", out, input, weight, scales, layout=layout)


@supported_compute_capability([90])
def _check_gated(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    weight_ready: bool,
) -> bool:
    check_tensors(input=input, weight=weight)
    check_flag("weight_ready", weight_ready)
    for name, operand in (("input", input), ("weight", weight)):
        check_dtype(name, operand.dtype, (torch.float8_e4m3fn,))
        if operand.ndim != 2 or not operand.is_contiguous():
            raise ValueError(
                f"`{name}` must be a contiguous matrix, got shape {list(operand.shape)} and "
                f"strides {list(operand.stride())}"
            )
    (m, k), n = input.shape, weight.shape[0]
    if weight.shape[1] != k or k == 0 or k % SCALE_BLOCK:
        raise ValueError(
            f"`weight` must have shape [n, {k}] for `input`, a multiple of 128, got "
            f"{list(weight.shape)}"
        )
    if n == 0 or n % (2 * SCALE_BLOCK):
        raise ValueError(f"`weight` must have an n that is a multiple of 256, got {n}")
    _check_scale("input", input, input_scale, [(m, k // SCALE_BLOCK)])
    _check_scale("weight", weight, weight_scale, [(n // SCALE_BLOCK, k // SCALE_BLOCK)])
    check_out(out, (m, n // 2), torch.float8_e4m3fn)
    check_out(out_scale, (m, n // 2 // SCALE_BLOCK), torch.float32, name="out_scale")
    check_same_device(
        input=input,
        weight=weight,
        input_scale=input_scale,
        weight_scale=weight_scale,
        out=out,
        out_scale=out_scale,
    )
    return True


@backend_requirement({}, common_check=_check_gated)
@flashinfer_api(trace=fp8_blockscale_gemm_swiglu_sm90_trace)
def fp8_blockscale_gemm_swiglu_sm90(
    input: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    *,
    weight_ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu(gates) * values`` of ``input @ weight.T``, in 8 bits with a scale for 128 columns.

    As `fp8_blockscale_gemm_sm90`, the gated activation and `per_token_group_quant_8bit` one after
    the other, but in one kernel: neither the product nor its activation is rounded to 16 bits.

    Parameters
    ----------
    input : torch.Tensor
        ``[m, k]``, float8_e4m3fn, contiguous, on a Hopper GPU; k is a multiple of 128.
    weight : torch.Tensor
        ``[n, k]``, float8_e4m3fn, contiguous: the first half of the rows makes gates, the second
        one values. n is a multiple of 256.
    input_scale : torch.Tensor
        ``[m, k / 128]``, float32, any strides.
    weight_scale : torch.Tensor
        ``[n / 128, k / 128]``, float32, any strides.
    out : torch.Tensor, optional
        ``[m, n / 2]``, float8_e4m3fn, contiguous: receives the codes.
    out_scale : torch.Tensor, optional
        ``[m, n / 256]``, float32, contiguous: receives the scales, each the largest magnitude of
        128 columns divided by 448.
    weight_ready : bool
        As for `fp8_blockscale_gemm_sm90`. Changes no result.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        Codes and scales; `out` and `out_scale` if they were given.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.

    Notes
    -----
    Shazeer, "GLU Variants Improve Transformer", 2020; scales as for `fp8_blockscale_gemm_sm90`.

    Examples
    --------
    >>> x = torch.randn(16, 256, device="cuda").to(torch.float8_e4m3fn)
    >>> w = torch.randn(512, 256, device="cuda").to(torch.float8_e4m3fn)
    >>> scales = torch.ones(16, 2, device="cuda"), torch.ones(4, 2, device="cuda")
    >>> codes, scale = flashinfer.gemm.fp8_blockscale_gemm_swiglu_sm90(x, w, *scales)
    >>> codes.shape, scale.shape
    (torch.Size([16, 256]), torch.Size([16, 2]))
    """
    (m, k), n = input.shape, weight.shape[0]
    out = input.new_empty((m, n // 2)) if out is None else out
    if out_scale is None:
        out_scale = input_scale.new_empty((m, n // 2 // SCALE_BLOCK))
    if m == 0:
        return out, out_scale
    problem = GemmProblem(
        input.dtype,
        weight.dtype,
        out.dtype,
        rows=m,
        columns=n,
        k=k,
        scale="block",
        activation="swiglu",
    )
    scales = input_scale, weight_scale, out_scale
    layout = STARTS_EARLY if weight_ready else 0
    launch(problem, "input", out, input, weight, scales, layout=layout)
    return out, out_scale
