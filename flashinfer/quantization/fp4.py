"""4-bit codes (E2M1) with a scale per block of each row: NVFP4 and MXFP4."""

from typing import Any

import torch

from .. import env
from .._common import checks
from .._common.conversions import converted
from .._common.numbers import plain
from .._instrument.decorator import flashinfer_api
from ..jit.quantization import GroupQuantConfig, gen_group_quant_module
from ..tllm_enums import SfLayout
from ..trace.templates.fp4 import (
    fp4_quantize_trace,
    mxfp4_quantize_trace,
    nvfp4_quantize_trace,
    silu_and_mul_nvfp4_quantize_trace,
)
from ._kernels import group_quant_kernel
from .layout import KERNEL_LAYOUT, check_layout, padded_shape

_ARCHITECTURES = ("90", "100", "103", "110", "120", "121")


def get_fp4_quantization_module(backend: str = "100") -> Any:
    """The loaded module of `nvfp4_quantize` for bfloat16, with FlashInfer's argument.

    Parameters
    ----------
    backend : str
        An architecture by FlashInfer's name, ``"90"`` to ``"121"``. The module is the same for
        all: it is compiled for the targets of the process.

    Raises
    ------
    ValueError
        If FlashInfer has no such module.
    """
    checks.choice("backend", backend, _ARCHITECTURES)
    config = GroupQuantConfig(torch.bfloat16, "e2m1", "e4m3", "swizzled_128x4", 16)
    return gen_group_quant_module(config).build_and_load()


def _quantize(
    input: Any,
    global_scale: torch.Tensor | None,
    block: int,
    scale: str,
    layout: SfLayout,
    *,
    name: str = "input",
    invert: bool = False,
    silu_and_mul: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[..., k / 2]`` and scales ``[rows, blocks]``, both padded as `layout` asks."""
    checks.matrix(name, input, 2 * block if silu_and_mul else block)
    kernel = group_quant_kernel(
        input, "e2m1", scale, KERNEL_LAYOUT[layout], block, silu_and_mul, name=name
    )
    if global_scale is not None:
        checks.tensor("global_scale", global_scale)
    width = input.shape[-1] // 2 if silu_and_mul else input.shape[-1]
    rows = input.shape[:-1].numel()
    codes = torch.empty(*input.shape[:-1], width // 2, dtype=torch.uint8, device=input.device)
    shape = padded_shape(layout, rows, width // block)
    scales = torch.empty(shape, dtype=torch.uint8, device=input.device)
    arguments = (codes, scales, input, global_scale, 1.0, invert, enable_pdl, False)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, {3: torch.float32}))
    return codes, scales


def _layout_of_flags(is_swizzled: bool, is_8x4: bool) -> SfLayout:
    checks.flag("is_sf_swizzled_layout", is_swizzled)
    checks.flag("is_sf_8x4_layout", is_8x4)
    if not is_swizzled:
        if is_8x4:
            raise ValueError("`is_sf_8x4_layout` needs `is_sf_swizzled_layout`, got False")
        return SfLayout.layout_linear
    return SfLayout.layout_8x4 if is_8x4 else SfLayout.layout_128x4


def _refuse(**arguments: object) -> None:
    """Refuse options of kernels for Blackwell that are not built here."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            error = ValueError if isinstance(value, bool) else TypeError
            raise error(f"`{name}` must be None or False: it is not supported, got {value!r}")


def _refuse_4over6(nvfp4_4over6: object) -> None:
    """Refuse blocks scaled to 4, whether an argument or the environment asks for them."""
    _refuse(nvfp4_4over6=nvfp4_4over6)
    if env.FLASHINFER_NVFP4_4OVER6.get():
        raise ValueError(
            "`nvfp4_4over6` must be None and FLASHINFER_NVFP4_4OVER6 unset: blocks scaled to 4 are "
            "not supported, got None and a variable that is on"
        )


@flashinfer_api(trace=fp4_quantize_trace)
def fp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    nvfp4_4over6: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to 4 bits (E2M1) with an 8-bit scale for each block of neighbours in a row.

    With g the global scale and amax the largest magnitude of a block, NVFP4 (E4M3 scales) is
    ``sf = g * amax / 6`` rounded to nearest and ``x_q = input * (g / sf)``; MXFP4 (UE8M0 scales) is
    ``sf`` the least power of two not below ``amax / 6`` and ``x_q = input / sf``. Codes are
    rounded to nearest even and saturate. Each operation is a float32 one, correctly rounded. Runs
    on every architecture; where there is an instruction for the conversion it is used.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., k]``, float16, bfloat16 or float32, the last dimension contiguous, leading ones
        foldable into one (m rows); k is a multiple of `sf_vec_size`.
    global_scale : torch.Tensor, optional
        One float32 on the GPU, usually ``448 * 6 / input.abs().max()``; 1 if None; another
        floating dtype is converted. For NVFP4: MXFP4 has none, and what is given is not read.
    sf_vec_size : {16, 32}
        Elements of a block.
    sf_use_ue8m0 : bool
        Scales are powers of two (UE8M0) instead of E4M3.
    is_sf_swizzled_layout, is_sf_8x4_layout : bool
        Layout of the scales: tiles of 128x4, tiles of 8x4 (both flags), or rows (see `SfLayout`).
    is_global_scale_inversed : bool
        `global_scale` holds 1 / g.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: where the device has it. Changes no result.
    backend : {"cuda"}
        The CuTe-DSL backend needs Blackwell and is refused.
    nvfp4_4over6 : None
        Blocks scaled to 4 instead of 6 are not supported; the switch ``FLASHINFER_NVFP4_4OVER6``,
        which asks for them, is refused with E4M3 scales.

    Returns
    -------
    x_q : torch.Tensor
        ``[..., k / 2]``, uint8: two codes a byte, the first one in the lower bits.
    sf : torch.Tensor
        ``[rows, blocks]``, uint8, m and k / `sf_vec_size` padded to whole tiles with zeros.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above, or `input` is not on the GPU.

    Notes
    -----
    NVIDIA, "Pretraining Large Language Models with NVFP4", 2025; Open Compute Project, "OCP
    Microscaling Formats (MX) Specification 1.0", 2023. A NaN makes the scale of its block NaN;
    infinities saturate.

    Examples
    --------
    >>> x = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda")
    >>> x_q, sf = flashinfer.fp4_quantize(x, 448 * 6 / x.float().abs().max().reshape(1))
    >>> x_q.shape, sf.shape
    (torch.Size([16, 2048]), torch.Size([128, 256]))
    """
    checks.choice("backend", backend, ("cuda",))
    sf_vec_size = plain(sf_vec_size)
    checks.choice("sf_vec_size", sf_vec_size, (16, 32))
    checks.flag("sf_use_ue8m0", sf_use_ue8m0)
    checks.flag("is_global_scale_inversed", is_global_scale_inversed)
    if sf_use_ue8m0:
        _refuse(nvfp4_4over6=nvfp4_4over6)
    else:
        _refuse_4over6(nvfp4_4over6)
    if sf_use_ue8m0 and global_scale is not None:
        checks.tensor("global_scale", global_scale)
    return _quantize(
        input,
        None if sf_use_ue8m0 else global_scale,
        sf_vec_size,
        "ue8m0" if sf_use_ue8m0 else "e4m3",
        _layout_of_flags(is_sf_swizzled_layout, is_sf_8x4_layout),
        invert=bool(is_global_scale_inversed) and not sf_use_ue8m0,
        enable_pdl=enable_pdl,
    )


@flashinfer_api(trace=nvfp4_quantize_trace)
def nvfp4_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    per_token_activation: bool = False,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    nvfp4_4over6: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to NVFP4: `fp4_quantize` with E4M3 scales of blocks of 16.

    Parameters
    ----------
    a, a_global_sf
        `input` and `global_scale` of `fp4_quantize`.
    sfLayout : SfLayout
        Layout of the scales.
    sf_vec_size : {16}
        Elements of a block.
    enable_pdl, backend
        As for `fp4_quantize`, as are the result and the errors.
    do_shuffle, per_token_activation, expanded_idx_to_permuted_idx, out_scale, nvfp4_4over6
        Not supported: the shuffle and the scales per token belong to kernels for Blackwell.
    """
    checks.choice("backend", backend, ("cuda",))
    checks.choice("sf_vec_size", sf_vec_size, (16,))
    _refuse(
        do_shuffle=do_shuffle,
        per_token_activation=per_token_activation,
        expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
        out_scale=out_scale,
    )
    _refuse_4over6(nvfp4_4over6)
    layout = check_layout("sfLayout", sfLayout)
    checks.tensor("a_global_sf", a_global_sf)
    return _quantize(a, a_global_sf, 16, "e4m3", layout, name="a", enable_pdl=enable_pdl)


@flashinfer_api(trace=mxfp4_quantize_trace)
def mxfp4_quantize(
    a: torch.Tensor,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: SfLayout = SfLayout.layout_128x4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MXFP4: `fp4_quantize` with power-of-two scales of blocks of 32.

    Parameters
    ----------
    a : torch.Tensor
        `input` of `fp4_quantize`.
    backend, enable_pdl
        As for `fp4_quantize`, as are the result and the errors.
    sfLayout : SfLayout
        Layout of the scales.
    """
    checks.choice("backend", backend, ("cuda",))
    layout = check_layout("sfLayout", sfLayout)
    return _quantize(a, None, 32, "ue8m0", layout, name="a", enable_pdl=enable_pdl)


@flashinfer_api(trace=silu_and_mul_nvfp4_quantize_trace)
def silu_and_mul_nvfp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor,
    sf_vec_size: int = 16,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: bool | None = None,
    nvfp4_4over6: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu_and_mul`, rounded to the dtype of `input`, and `nvfp4_quantize` in one pass.

    Gives the bits of the two calls one after the other.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., 2 * k]``: gate, then up. Otherwise as for `fp4_quantize`, as are the other
        arguments, the errors and the result for ``[..., k]``.
    sf_vec_size : {16}
        Elements of a block.
    """
    checks.choice("sf_vec_size", sf_vec_size, (16,))
    _refuse_4over6(nvfp4_4over6)
    layout = _layout_of_flags(is_sf_swizzled_layout, is_sf_8x4_layout)
    checks.tensor("global_scale", global_scale)
    return _quantize(
        input, global_scale, 16, "e4m3", layout, silu_and_mul=True, enable_pdl=enable_pdl
    )
