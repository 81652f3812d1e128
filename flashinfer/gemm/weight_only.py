"""Products with weights of 4 and 8 bits and activations of 16 bits."""

from typing import Literal

import torch

from .._common.checks import optional_flag as check_optional_flag
from .._common.checks import same_device as check_same_device
from .._common.checks import tensor as check_tensor
from .._common.checks import tensors as check_tensors
from .._common.dtypes import check_dtype
from .._instrument.decorator import flashinfer_api
from ..compat.backends import backend_requirement, supported_compute_capability
from ..trace.templates.weight_only import weight_only_linear_trace
from ._checks import check_out
from ._weight_kernels import choose_weight_config, get_weight_gemm_kernel, is_aligned

_ACTIVATIONS = (torch.bfloat16, torch.float16)
_INT_GROUPS = (32, 64, 128)
_FLOAT_GROUPS = {"mxfp4": 32, "nvfp4": 16}
_SCALE_TYPES = {
    "mxfp4": (torch.uint8, torch.float8_e8m0fnu),
    "nvfp4": (torch.float8_e4m3fn, torch.uint8),
}
_SCALE_VIEWS = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}
WeightFormat = Literal["int4", "int8", "mxfp4", "nvfp4"]


def _group_size(weight_format: str, k: int, weight_scale: torch.Tensor) -> int:
    """Elements that share a scale; 0 where a row has one."""
    if weight_format in _FLOAT_GROUPS:
        return _FLOAT_GROUPS[weight_format]
    if weight_scale.ndim == 1 or weight_scale.shape[-1] == 1:
        return 0
    return k // weight_scale.shape[-1] if weight_scale.shape[-1] else 0


@supported_compute_capability([80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def _check(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_format: str,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    enable_pdl: bool | None,
) -> bool:
    check_tensors(input=input, weight=weight, weight_scale=weight_scale)
    if weight_format not in ("int4", "int8", *_FLOAT_GROUPS):
        raise ValueError(
            "`weight_format` must be 'int4', 'int8', 'mxfp4' or 'nvfp4', got " + repr(weight_format)
        )
    check_dtype("input", input.dtype, _ACTIVATIONS)
    check_tensor("input", input, 2)
    check_tensor("weight", weight, 2)
    check_dtype("weight", weight.dtype, (torch.int8 if weight_format == "int8" else torch.uint8,))
    (m, k), n = input.shape, weight.shape[0]
    columns = k if weight_format == "int8" else k // 2
    unit = 16 if weight_format == "int8" else 32
    if k == 0 or k % unit or weight.shape[1] != columns:
        raise ValueError(
            f"`weight` must have shape [n, {columns}] for `input` with k = {k}, a multiple of "
            f"{unit}, got {list(weight.shape)}"
        )
    _check_scale(weight_format, input, n, weight_scale)
    check_optional_flag("enable_pdl", enable_pdl)
    if bias is not None:
        check_tensor("bias", bias)
        check_dtype("bias", bias.dtype, (input.dtype,))
        if bias.shape != (n,):
            raise ValueError(f"`bias` must have shape [{n}], got {list(bias.shape)}")
    if alpha is not None:
        check_tensor("alpha", alpha)
        check_dtype("alpha", alpha.dtype, (torch.float32,))
        if alpha.numel() != 1:
            raise ValueError(f"`alpha` must have one element, got shape {list(alpha.shape)}")
    check_out(out, (m, n), input.dtype)
    check_same_device(
        input=input, weight=weight, weight_scale=weight_scale, alpha=alpha, bias=bias, out=out
    )
    return True


def _check_scale(weight_format: str, input: torch.Tensor, n: int, scale: torch.Tensor) -> None:
    k = input.shape[1]
    allowed = _SCALE_TYPES.get(weight_format, (input.dtype, torch.float32))
    check_dtype("weight_scale", scale.dtype, allowed)
    if weight_format in _FLOAT_GROUPS:
        shapes = [[n, -(-k // _FLOAT_GROUPS[weight_format])]]
    else:
        shapes = [[n], [n, 1], *([n, k // group] for group in _INT_GROUPS if k % group == 0)]
    if list(scale.shape) not in shapes:
        raise ValueError(
            f"`weight_scale` must have shape {' or '.join(map(str, shapes))}, got "
            f"{list(scale.shape)}"
        )


@backend_requirement({}, common_check=_check)
@flashinfer_api(trace=weight_only_linear_trace)
def weight_only_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_format: WeightFormat,
    alpha: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """``out = alpha * (input @ W.T) + bias`` with weights W of 4 or 8 bits and their scales.

    Codes become 16-bit numbers without rounding; products are summed in float32, and scales of
    integers and of MXFP4 multiply these sums. Made for few rows: the time is that of reading the
    weights once up to about 16 rows.

    Parameters
    ----------
    input : torch.Tensor
        ``[m, k]``, bfloat16 or float16, rows contiguous and beginning at multiples of 16 bytes, on
        a GPU of compute capability 8.0 or newer. k is a multiple of 32, or of 16 for ``"int8"``.
    weight : torch.Tensor
        Codes, rows contiguous and beginning at multiples of 16 bytes. ``[n, k]``, int8, for
        ``"int8"``. Otherwise ``[n, k / 2]``, uint8, the first of two codes in the lower four bits:
        two's complement for ``"int4"``, e2m1 for ``"mxfp4"`` and ``"nvfp4"``.
    weight_scale : torch.Tensor
        Factors of the codes, rows contiguous. For integers of `input`'s type or
        float32, ``[n]`` or ``[n, 1]`` for a scale per row, or ``[n, k / group]`` with groups of 32,
        64 or 128 elements. ``"mxfp4"``: ``[n, k / 32]``, float8_e8m0fnu or the same bytes as
        uint8. ``"nvfp4"``: ``[n, k / 16]``, float8_e4m3fn or the same bytes as uint8.
    weight_format : {"int4", "int8", "mxfp4", "nvfp4"}
        Format of the codes.
    alpha : torch.Tensor, optional
        One float32 element on the GPU, such as the global scale of NVFP4 weights; 1 if None.
    bias : torch.Tensor, optional
        ``[n]``, dtype of `input`, contiguous.
    out : torch.Tensor, optional
        ``[m, n]``, dtype of `input`, contiguous: receives the result.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the GPU has it. Changes no result.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; `out` if it was given.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is older.

    Notes
    -----
    Formats: Open Compute Project, "OCP Microscaling Formats (MX) Specification 1.0", 2023, for
    e2m1 and MXFP4.

    Examples
    --------
    >>> x = torch.randn(4, 256, dtype=torch.bfloat16, device="cuda")
    >>> codes = torch.randint(0, 256, (64, 128), dtype=torch.uint8, device="cuda")
    >>> scale = torch.rand(64, 2, device="cuda").bfloat16()
    >>> flashinfer.gemm.weight_only_linear(x, codes, scale, "int4").shape
    torch.Size([4, 64])
    """
    (m, k), n = input.shape, weight.shape[0]
    if out is None:
        out = input.new_empty((m, n))
    if out.numel() == 0:
        return out
    group_size = _group_size(weight_format, k, weight_scale)
    if weight_format in _FLOAT_GROUPS:
        weight_scale = weight_scale.view(_SCALE_VIEWS[weight_format])
    elif group_size == 0:
        weight_scale = weight_scale.reshape(n)
    if alpha is not None:
        alpha = alpha.reshape(1)
    config = choose_weight_config(
        input.device,
        input.dtype,
        out.dtype,
        weight_format,
        weight_scale.dtype,
        group_size,
        m,
        n,
        k,
        aligned=is_aligned(weight_scale),
    )
    kernel = get_weight_gemm_kernel(config)
    kernel(0, out, input, weight, weight_scale, alpha, bias, None, None, enable_pdl)
    return out
