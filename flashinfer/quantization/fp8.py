"""8-bit codes with a scale per group of each row."""

import torch

from .._common import checks
from .._common.dtypes import check_dtype
from .._instrument.decorator import flashinfer_api
from ..tllm_enums import SfLayout
from ..trace.templates.quantization import (
    mxfp8_dequantize_host_trace,
    mxfp8_quantize_trace,
    per_token_group_quant_8bit_trace,
    silu_and_mul_per_token_group_quant_8bit_trace,
)
from ._kernels import group_quant_kernel
from .layout import KERNEL_LAYOUT, check_layout, padded_shape, to_linear

_CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
_MX_BLOCK = 32


@flashinfer_api(trace=per_token_group_quant_8bit_trace)
def per_token_group_quant_8bit(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    backend: str = "cutile",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each group of `group_size` neighbours in a row with a scale of its own.

    ``scale = max(amax, eps) / qmax`` with the largest magnitude amax of the group and the largest
    value qmax of `dst_dtype` (448, 57344 or 127), and ``x_q = x / scale``, rounded to nearest even.
    Quotients are correctly rounded in float32 first, so ``(x.float() / scale).to(dst_dtype)`` in
    PyTorch gives the same bits.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., k]``, float16, bfloat16 or float32, the last dimension contiguous, leading ones
        foldable into one. k is a multiple of `group_size`.
    group_size : int
        Elements that share a scale. Multiples of 16 up to 1024 are fast; others read twice.
    eps : float
        Least magnitude that a scale is made for, between 1e-30 and 1e30.
    dst_dtype : torch.dtype, optional
        float8_e4m3fn (None too), float8_e5m2 or int8.
    column_major_scales : bool
        Scales of neighbouring rows lie next to each other: strides (1, m). Two-dimensional `x`
        only.
    scale_tma_aligned : bool
        Column-major scales begin every group on 16 bytes: strides (1, m rounded up to 4).
    scale_ue8m0 : bool
        Scales are rounded up to powers of two (still float32), which tensor cores with UE8M0
        scales take without loss.
    backend : {"cutile", "cuda"}
        Both mean the same kernel here; the first is the name callers of FlashInfer use.

    Returns
    -------
    x_q : torch.Tensor
        Shape of `x`, contiguous.
    scale : torch.Tensor
        ``[..., k // group_size]``, float32; ``x_q * scale`` approximates `x`. A group with a NaN
        has scale NaN; one with an infinity has scale infinity.

    Raises
    ------
    TypeError
        If `x` is not a tensor, `eps` not a number, `dst_dtype` not a dtype or a flag not a bool.
    ValueError
        If `x` is not on the GPU or has a shape, dtype or stride not listed above; if
        `column_major_scales` meets another rank than 2; if `scale_tma_aligned` is asked for without
        it; or if another argument has a value not listed above.

    Examples
    --------
    >>> x = torch.randn(16, 7168, dtype=torch.bfloat16, device="cuda")
    >>> x_q, scale = flashinfer.quantization.per_token_group_quant_8bit(x, 128)
    >>> x_q.dtype, scale.shape
    (torch.float8_e4m3fn, torch.Size([16, 56]))
    """
    return _group_quant_8bit(
        x,
        group_size,
        eps,
        dst_dtype,
        column_major_scales,
        scale_tma_aligned,
        scale_ue8m0,
        backend,
        silu_and_mul=False,
    )


@flashinfer_api(trace=silu_and_mul_per_token_group_quant_8bit_trace)
def silu_and_mul_per_token_group_quant_8bit(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu_and_mul`, rounded to the dtype of `x`, and `per_token_group_quant_8bit` in one pass.

    Gives the bits of the two calls one after the other.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., 2 * k]``: gate, then up. Otherwise as for `per_token_group_quant_8bit`, as are the
        other arguments, the errors and the result for ``[..., k]``.
    """
    return _group_quant_8bit(
        x,
        group_size,
        eps,
        dst_dtype,
        column_major_scales,
        scale_tma_aligned,
        scale_ue8m0,
        "cuda",
        silu_and_mul=True,
    )


def _group_quant_8bit(
    x: torch.Tensor,
    group_size: int,
    eps: float,
    dst_dtype: torch.dtype | None,
    column_major_scales: bool,
    scale_tma_aligned: bool,
    scale_ue8m0: bool,
    backend: str,
    *,
    silu_and_mul: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    checks.flag("column_major_scales", column_major_scales)
    checks.flag("scale_tma_aligned", scale_tma_aligned)
    checks.flag("scale_ue8m0", scale_ue8m0)
    checks.choice("backend", backend, ("cutile", "cuda"))
    group_size = checks.count("group_size", group_size)
    if scale_tma_aligned and not column_major_scales:
        raise ValueError("`scale_tma_aligned` needs `column_major_scales`, got False")
    dst_dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    checks.dtype("dst_dtype", dst_dtype, tuple(_CODES))
    checks.matrix("x", x, (2 if silu_and_mul else 1) * group_size)
    kernel = group_quant_kernel(
        x,
        _CODES[dst_dtype],
        "power_of_two_float32" if scale_ue8m0 else "float32",
        "column_major" if column_major_scales else "linear",
        group_size,
        silu_and_mul,
        name="x",
    )
    width = x.shape[-1] // 2 if silu_and_mul else x.shape[-1]
    x_q = torch.empty(*x.shape[:-1], width, dtype=dst_dtype, device=x.device)
    groups = width // group_size
    if not column_major_scales:
        scale = torch.empty(*x.shape[:-1], groups, dtype=torch.float32, device=x.device)
        kernel(x_q, scale, x, None, eps, False, None, False)
        return x_q, scale
    if x.ndim != 2:
        raise ValueError(
            f"`x` must have 2 dimensions for `column_major_scales`, got shape {list(x.shape)}"
        )
    rows = x.shape[0]
    stride = -(-rows // 4) * 4 if scale_tma_aligned else rows
    scale = torch.empty(groups, stride, dtype=torch.float32, device=x.device)
    kernel(x_q, scale, x, None, eps, False, None, False)
    return x_q, scale[:, :rows].t()


def _chosen_layout(is_swizzled: bool, layout: SfLayout | None) -> SfLayout:
    checks.flag("is_sf_swizzled_layout", is_swizzled)
    if layout is None:
        return SfLayout.layout_128x4 if is_swizzled else SfLayout.layout_linear
    return check_layout("sf_swizzle_layout", layout)


@flashinfer_api(trace=mxfp8_quantize_trace)
def mxfp8_quantize(
    input: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    sf_swizzle_layout: SfLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MXFP8: E4M3 with a power-of-two scale for each 32 neighbours in a row.

    The scale is the least power of two that is not below amax / 448, so nothing saturates; with it
    ``x_q = input / scale`` is rounded once, to nearest even. Runs on every architecture.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., k]``, float16, bfloat16 or float32, the last dimension contiguous, leading ones
        foldable into one (m rows); k is a multiple of 32.
    is_sf_swizzled_layout : bool
        Scales in the layout ``SfLayout.layout_128x4``, else ``layout_linear``.
    alignment : int
        Rows of the result are padded with zeros to a multiple of this; a multiple of 32.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the device has it. Changes no result.
    backend : {"cuda"}
        The CuTe-DSL backend needs Blackwell and is refused.
    sf_swizzle_layout : SfLayout, optional
        The layout by name; `is_sf_swizzled_layout` does not count then.

    Returns
    -------
    x_q : torch.Tensor
        ``[..., k rounded up to alignment]``, float8_e4m3fn.
    sf : torch.Tensor
        One dimension, uint8: the scales' exponents plus 127, in the chosen layout, its padding
        zero. A block with a NaN has 255, one with an infinity 254.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above, or `input` is not on the GPU.

    Notes
    -----
    Open Compute Project, "OCP Microscaling Formats (MX) Specification 1.0", 2023; the scale is
    rounded up as in A. Mishra et al., "Recipes for Pre-training LLMs with MXFP8", 2025.

    Examples
    --------
    >>> x = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda")
    >>> x_q, sf = flashinfer.mxfp8_quantize(x, is_sf_swizzled_layout=False)
    >>> x_q.shape, sf.shape
    (torch.Size([16, 4096]), torch.Size([2048]))
    """
    checks.choice("backend", backend, ("cuda",))
    layout = _chosen_layout(is_sf_swizzled_layout, sf_swizzle_layout)
    alignment = checks.count("alignment", alignment, _MX_BLOCK)
    if alignment % _MX_BLOCK:
        raise ValueError(f"`alignment` must be a multiple of {_MX_BLOCK}, got {alignment!r}")
    checks.matrix("input", input, _MX_BLOCK)
    kernel = group_quant_kernel(input, "e4m3", "ue8m0", KERNEL_LAYOUT[layout], _MX_BLOCK, False)
    width = -(-input.shape[-1] // alignment) * alignment
    x_q = torch.empty(*input.shape[:-1], width, dtype=torch.float8_e4m3fn, device=input.device)
    rows = input.shape[:-1].numel()
    padded_rows, padded_blocks = padded_shape(layout, rows, width // _MX_BLOCK)
    sf = torch.empty(padded_rows * padded_blocks, dtype=torch.uint8, device=input.device)
    kernel(x_q, sf, input, None, 1.0, False, enable_pdl, False)
    return x_q, sf


@flashinfer_api(trace=mxfp8_dequantize_host_trace)
def mxfp8_dequantize_host(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    sf_swizzle_layout: SfLayout | None = None,
) -> torch.Tensor:
    """Undo `mxfp8_quantize`, in PyTorch: for checks and for loading, on any device.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., k]``, float8_e4m3fn (or its bytes as uint8); k is a multiple of 32.
    scale_tensor : torch.Tensor
        uint8, one scale for each 32 elements of a row, in the layout that the other arguments
        name; on the device of `input`.
    is_sf_swizzled_layout, sf_swizzle_layout
        As for `mxfp8_quantize`.

    Returns
    -------
    torch.Tensor
        ``input * scale``, shape of `input`, float32.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    layout = _chosen_layout(is_sf_swizzled_layout, sf_swizzle_layout)
    checks.matrix("input", input, _MX_BLOCK)
    check_dtype("input", input.dtype, (torch.float8_e4m3fn, torch.uint8))
    checks.matrix("scale_tensor", scale_tensor, 1)
    check_dtype("scale_tensor", scale_tensor.dtype, (torch.uint8,))
    checks.same_device(input=input, scale_tensor=scale_tensor)
    rows, blocks = input.shape[:-1].numel(), input.shape[-1] // _MX_BLOCK
    exponents = to_linear("scale_tensor", scale_tensor, layout, rows, blocks)
    scale = exponents.view(torch.float8_e8m0fnu).float()
    values = input.view(torch.float8_e4m3fn).float().reshape(rows, blocks, _MX_BLOCK)
    return (values * scale[..., None]).reshape(input.shape)
