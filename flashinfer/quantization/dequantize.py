"""4-bit codes back to float32, in PyTorch: for checks and for loading, on any device."""

import torch

from .._common import checks
from .._common.dtypes import check_dtype
from .._common.numbers import plain
from .._instrument.decorator import flashinfer_api
from ..tllm_enums import SfLayout
from ..trace.templates.fp4 import (
    e2m1_and_ufp8sf_scale_to_float_trace,
    mxfp4_dequantize_host_trace,
    mxfp4_dequantize_trace,
)
from .layout import check_layout, to_linear

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_FORMATS = (torch.float8_e8m0fnu, torch.float8_e4m3fn)


def _values(name: str, packed: object) -> torch.Tensor:
    """Values of the codes in `packed`, two a byte."""
    packed = checks.matrix(name, packed, 1)
    check_dtype(name, packed.dtype, (torch.uint8,))
    table = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return table[codes.int()]


def _bytes(name: str, scales: object) -> torch.Tensor:
    scales = checks.matrix(name, scales, 1)
    if scales.dtype in _SCALE_FORMATS:
        scales = scales.view(torch.uint8)
    check_dtype(name, scales.dtype, (torch.uint8,))
    return scales


def _scaled(
    name: str,
    values: torch.Tensor,
    scale_name: str,
    scales: object,
    block: int,
    layout: SfLayout,
    scale_format: torch.dtype,
) -> torch.Tensor:
    """Each block of `values` times its scale."""
    if values.shape[-1] % block:
        raise ValueError(
            f"`{name}` must have rows of whole blocks of {block} values, got {values.shape[-1]}"
        )
    checks.same_device(**{name: values, scale_name: checks.tensor(scale_name, scales)})
    rows, blocks = values.shape[:-1].numel(), values.shape[-1] // block
    linear = to_linear(scale_name, _bytes(scale_name, scales), layout, rows, blocks)
    scale = linear.view(scale_format).float()
    return (values.reshape(rows, blocks, block) * scale[..., None]).reshape(values.shape)


@flashinfer_api(trace=e2m1_and_ufp8sf_scale_to_float_trace)
def e2m1_and_ufp8sf_scale_to_float(
    e2m1_tensor: torch.Tensor,
    ufp8_scale_tensor: torch.Tensor,
    global_scale_tensor: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> torch.Tensor:
    """Undo `fp4_quantize`: ``code * (scale * global scale)``.

    Parameters
    ----------
    e2m1_tensor : torch.Tensor
        ``[..., k / 2]``, uint8, two codes a byte, the first one in the lower bits.
    ufp8_scale_tensor : torch.Tensor
        uint8 (or the 8-bit float it stands for), as many elements as the layout holds, on the
        device of `e2m1_tensor`.
    global_scale_tensor : torch.Tensor, optional
        One float32 that multiplies the result: the reciprocal of `fp4_quantize`'s. 1 if None.
    sf_vec_size : {16, 32}
        Elements of a block.
    ufp8_type : {0, 1}
        Format of the scales: 0 is UE8M0, 1 is E4M3.
    is_sf_swizzled_layout, is_sf_8x4_layout : bool
        Layout of the scales, as for `fp4_quantize`.

    Returns
    -------
    torch.Tensor
        ``[..., k]``, float32.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    checks.choice("sf_vec_size", sf_vec_size, (16, 32))
    checks.choice("ufp8_type", ufp8_type, (0, 1))
    checks.flag("is_sf_swizzled_layout", is_sf_swizzled_layout)
    checks.flag("is_sf_8x4_layout", is_sf_8x4_layout)
    if is_sf_8x4_layout and not is_sf_swizzled_layout:
        raise ValueError("`is_sf_8x4_layout` needs `is_sf_swizzled_layout`, got False")
    swizzled = SfLayout.layout_8x4 if is_sf_8x4_layout else SfLayout.layout_128x4
    layout = swizzled if is_sf_swizzled_layout else SfLayout.layout_linear
    values = _values("e2m1_tensor", e2m1_tensor)
    if global_scale_tensor is not None:
        checks.tensor("global_scale_tensor", global_scale_tensor)
        checks.same_device(e2m1_tensor=values, global_scale_tensor=global_scale_tensor)
        check_dtype("global_scale_tensor", global_scale_tensor.dtype, (torch.float32,))
        if global_scale_tensor.numel() != 1:
            raise ValueError(
                "`global_scale_tensor` must have one element, got shape "
                f"{list(global_scale_tensor.shape)}"
            )
    result = _scaled(
        "e2m1_tensor",
        values,
        "ufp8_scale_tensor",
        ufp8_scale_tensor,
        sf_vec_size,
        layout,
        _SCALE_FORMATS[ufp8_type],
    )
    return result if global_scale_tensor is None else result * global_scale_tensor.reshape(())


@flashinfer_api(trace=mxfp4_dequantize_trace)
def mxfp4_dequantize(
    a_fp4: torch.Tensor, a_sf: torch.Tensor, sfLayout: SfLayout = SfLayout.layout_128x4
) -> torch.Tensor:
    """Undo `mxfp4_quantize`.

    Parameters
    ----------
    a_fp4 : torch.Tensor
        ``[..., k / 2]``, uint8, two codes a byte.
    a_sf : torch.Tensor
        uint8, exponents plus 127 of blocks of 32, in the layout `sfLayout`.
    sfLayout : SfLayout
        Layout of the scales.

    Returns
    -------
    torch.Tensor
        ``[..., k]``, float32.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    layout = check_layout("sfLayout", sfLayout)
    values = _values("a_fp4", a_fp4)
    return _scaled("a_fp4", values, "a_sf", a_sf, 32, layout, torch.float8_e8m0fnu)


@flashinfer_api(trace=mxfp4_dequantize_host_trace)
def mxfp4_dequantize_host(
    weight: torch.Tensor, scale: torch.Tensor, group_size: int = 32
) -> torch.Tensor:
    """MXFP4 weights, with scales in rows, to float32.

    Parameters
    ----------
    weight : torch.Tensor
        ``[..., k / 2]``, uint8, two codes a byte.
    scale : torch.Tensor
        ``[..., k / group_size]``, uint8, exponents plus 127, row-major.
    group_size : int
        Elements of a block, even.

    Returns
    -------
    torch.Tensor
        ``[..., k]``, float32.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    group_size = plain(group_size)
    if type(group_size) is not int or group_size < 2 or group_size % 2:
        raise ValueError(f"`group_size` must be an even positive int, got {group_size!r}")
    values = _values("weight", weight)
    linear = SfLayout.layout_linear
    return _scaled("weight", values, "scale", scale, group_size, linear, torch.float8_e8m0fnu)
