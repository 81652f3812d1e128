"""Templates and references of 4-bit quantisation (E2M1) with block scales.

As in `quantization`: the references do the kernels' float32 operations, and results are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ...tllm_enums import SfLayout
from ..specs import FLOATING, Axis, Const, Tensor, Var
from ..template import TraceTemplate
from .block_scales import (
    divide,
    e2m1_codes,
    mx_codes,
    neighbouring_fp4,
    pack_pairs,
    same_bits,
    swizzle,
    to_8bit,
    unpack_pairs,
    unswizzle,
)


def _nvfp4_codes(
    x: torch.Tensor, block: int, global_scale: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quotients of blocks and their E4M3 scales as bytes, ``[rows, blocks]``."""
    blocks = x.reshape(x.shape[:-1].numel(), x.shape[-1] // block, block)
    scales = to_8bit(divide(blocks.abs().amax(-1) * global_scale, 6.0), torch.float8_e4m3fn)
    multiplier = global_scale / scales.float()
    multiplier = torch.where(scales.float() == 0, 0.0, multiplier)
    return blocks * multiplier[..., None], scales.view(torch.uint8)


def _fp4(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    block: int,
    ue8m0: bool,
    layout: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and scales in their layout."""
    if ue8m0:
        quotients, scales = mx_codes(x * global_scale, block, 6.0)
    else:
        quotients, scales = _nvfp4_codes(x, block, global_scale)
    packed = pack_pairs(e2m1_codes(quotients.reshape(x.shape)))
    height, width = {0: (128, 4), 1: (8, 4), 2: (1, 1)}[layout]
    rows, blocks = scales.shape
    padded = -(-rows // height) * height, -(-blocks // width) * width
    return packed, swizzle(scales, layout).reshape(padded)


def _fp4_quantize_reference(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sf = g * amax / 6 of each block in E4M3, or amax / 6 rounded up to 2^n (then g is 1);
    x_q = input * g / sf in E2M1.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025; Open Compute Project, "OCP
    Microscaling Formats (MX) Specification 1.0", 2023.
    """
    scale = torch.ones((), device=input.device)
    if is_sf_8x4_layout and not is_sf_swizzled_layout:
        raise ValueError("`is_sf_8x4_layout` needs `is_sf_swizzled_layout`")
    if input.shape[-1] % sf_vec_size:
        raise ValueError(f"`input` must have rows of whole blocks of {sf_vec_size}")
    if global_scale is not None:
        if global_scale.numel() != 1:
            raise ValueError("`global_scale` must have one element")
        scale = global_scale.reshape(())
    if is_global_scale_inversed:
        scale = torch.ones_like(scale) / scale
    if sf_use_ue8m0:
        scale = torch.ones_like(scale)
    layout = (1 if is_sf_8x4_layout else 0) if is_sf_swizzled_layout else 2
    return _fp4(input.float(), scale, sf_vec_size, sf_use_ue8m0, layout)


def _nvfp4_quantize_reference(
    a: torch.Tensor, a_global_sf: torch.Tensor, sfLayout: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """sf = g * amax / 6 of each 16 elements in E4M3; x_q = a * g / sf in E2M1.

    Source: as fp4_quantize.
    """
    if a_global_sf.numel() != 1:
        raise ValueError("`a_global_sf` must have one element")
    return _fp4(a.float(), a_global_sf.reshape(()), 16, False, int(sfLayout))


def _mxfp4_quantize_reference(
    a: torch.Tensor, sfLayout: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """sf = 2^ceil(log2(amax / 6)) of each 32 elements; x_q = a / sf in E2M1.

    Source: as fp4_quantize.
    """
    return _fp4(a.float(), 1.0, 32, True, int(sfLayout))


def _silu_and_mul_nvfp4_quantize_reference(
    input: torch.Tensor,
    global_scale: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = silu(gate) * up, rounded to the dtype of input; then as nvfp4_quantize.

    Source: as fp4_quantize; N. Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    gate, up = input.double().chunk(2, dim=-1)
    y = (gate * torch.sigmoid(gate) * up).to(input.dtype).float()
    layout = (1 if is_sf_8x4_layout else 0) if is_sf_swizzled_layout else 2
    return _fp4(y, global_scale.reshape(()), 16, False, layout)


def _dequantized(
    packed: torch.Tensor, scales: torch.Tensor, block: int, ue8m0: bool, layout: int
) -> torch.Tensor:
    """Values of codes times the scales of their blocks, in float64."""
    values = unpack_pairs(packed).double()
    blocks = values.reshape(-1, values.shape[-1] // block, block)
    codes = unswizzle(scales.view(torch.uint8), layout, blocks.shape[0], blocks.shape[1])
    if ue8m0:
        scale = torch.exp2(codes.double() - 127)
        scale = torch.where(codes == 255, math.nan, scale)
    else:
        scale = codes.contiguous().view(torch.float8_e4m3fn).double()
    return (blocks * scale[..., None]).reshape(values.shape)


def _e2m1_and_ufp8sf_scale_to_float_reference(
    e2m1_tensor: torch.Tensor,
    ufp8_scale_tensor: torch.Tensor,
    global_scale_tensor: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> torch.Tensor:
    """output = code * scale * global scale, a scale for each block of sf_vec_size elements.

    Source: as fp4_quantize.
    """
    layout = (1 if is_sf_8x4_layout else 0) if is_sf_swizzled_layout else 2
    result = _dequantized(e2m1_tensor, ufp8_scale_tensor, sf_vec_size, ufp8_type == 0, layout)
    if global_scale_tensor is not None:
        result = result * global_scale_tensor.double().reshape(())
    return result


def _mxfp4_dequantize_reference(
    a_fp4: torch.Tensor, a_sf: torch.Tensor, sfLayout: int = 0
) -> torch.Tensor:
    """output = code * 2^(scale - 127), a scale for each 32 elements.

    Source: as fp4_quantize.
    """
    return _dequantized(a_fp4, a_sf, 32, True, int(sfLayout))


def _mxfp4_dequantize_host_reference(
    weight: torch.Tensor, scale: torch.Tensor, group_size: int = 32
) -> torch.Tensor:
    """output = code * 2^(scale - 127), a scale for each group_size elements, in rows.

    Source: as fp4_quantize.
    """
    return _dequantized(weight, scale, group_size, True, 2)


def _block_scale_interleave_reference(unswizzled_sf: torch.Tensor) -> torch.Tensor:
    """out = scales of each matrix as tiles of 128 rows by 4 columns, padded with zeros.

    Source: NVIDIA, "cuBLAS Library User Guide", 1D block scaling factors layout, 2025.
    """
    scales = unswizzled_sf.view(torch.uint8) if unswizzled_sf.itemsize == 1 else unswizzled_sf
    matrices = scales.reshape(-1, *scales.shape[-2:]) if scales.numel() else scales[None, :0, :0]
    result = torch.cat([swizzle(matrix, 0) for matrix in matrices])
    return result.view(unswizzled_sf.dtype)


# ---- templates ---------------------------------------------------------------------------------

_FLAGS: dict[str, tuple[Any, ...]] = {
    "is_sf_swizzled_layout": (True, False),
    "is_sf_8x4_layout": (False, True),
}
_LAYOUT: dict[str, tuple[Any, ...]] = {"sfLayout": (*SfLayout, *map(int, SfLayout))}
_CUDA: dict[str, tuple[Any, ...]] = {"backend": ("cuda",)}
_NO_4OVER6: dict[str, tuple[Any, ...]] = {"nvfp4_4over6": (None,)}
_ROWS = ["num_tokens", "hidden_size"]


def _axes(width: int) -> dict[str, Axis]:
    """`width` input elements make one byte of codes."""

    def num_bytes(sizes: Mapping[str, int]) -> int:
        return sizes["hidden_size"] // width

    return {
        "num_tokens": Var("Rows."),
        "hidden_size": Const("Elements of an input row.", abbrev="h"),
        "one": Const("", abbrev="", value=1),
        "num_bytes": Const("Bytes of an output row.", abbrev="", derive=num_bytes),
        "scale_rows": Var("Rows of scales, padding of their layout included.", from_values=True),
        "scale_cols": Var("Scales of a row, padding included.", from_values=True),
    }


def _matrix(param: str) -> Tensor:
    ranks = range(1, 9)
    return Tensor(_ROWS, param=param, dtypes=FLOATING, ranks=ranks, layout="matrix")


def _global_scale(param: str, *, optional: bool = False) -> Tensor:
    return Tensor(
        ["one"], param=param, dtype="float32", optional=optional, ranks=(0, 1), converts=True
    )


_OUTPUTS: dict[str, Any] = {
    "x_q": Tensor(["num_tokens", "num_bytes"], dtype="uint8", description="Two codes a byte."),
    "sf": Tensor(["scale_rows", "scale_cols"], dtype="uint8", description="Scales."),
}


def _widened(*params: str) -> Any:
    """Example calls with rows of whole blocks and a global scale that is positive."""

    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        wide = {p: torch.cat([arguments[p]] * 64, dim=-1) for p in params}
        scales = {k: v[:1].abs() + 0.5 for k, v in arguments.items() if "global" in k}
        return arguments | wide | scales

    return init


def _quantize_trace(name: str, description: str, **properties: Any) -> TraceTemplate:
    return TraceTemplate(
        op_type="fp4_quantize",
        name_prefix=name,
        description=description,
        outputs=_OUTPUTS,
        hints=["enable_pdl"],
        **properties,
    )


fp4_quantize_trace = _quantize_trace(
    "fp4_quantize",
    "E2M1 codes with an 8-bit scale for each block of neighbours in a row.",
    axes=_axes(2),
    inputs={
        "input": _matrix("input"),
        "global_scale": _global_scale("global_scale", optional=True),
    },
    constraints=["hidden_size % 16 == 0"],
    tags=["status:verified", "quantize"],
    reference=_fp4_quantize_reference,
    check=same_bits,
    init=_widened("input"),
    options={
        "sf_vec_size": (16, 32),
        "sf_use_ue8m0": (False, True),
        "is_global_scale_inversed": (False, True),
        **_FLAGS,
        **_CUDA,
        **_NO_4OVER6,
    },
)

nvfp4_quantize_trace = _quantize_trace(
    "nvfp4_quantize",
    "E2M1 codes with an E4M3 scale for each 16 neighbours in a row.",
    axes=_axes(2),
    inputs={"a": _matrix("a"), "a_global_sf": _global_scale("a_global_sf")},
    constraints=["hidden_size % 16 == 0"],
    tags=["status:verified", "quantize"],
    reference=_nvfp4_quantize_reference,
    check=same_bits,
    init=_widened("a"),
    options={
        **_LAYOUT,
        "sf_vec_size": (16,),
        "do_shuffle": (False,),
        "per_token_activation": (False,),
        "expanded_idx_to_permuted_idx": (None,),
        "out_scale": (None,),
        **_CUDA,
        **_NO_4OVER6,
    },
)

mxfp4_quantize_trace = _quantize_trace(
    "mxfp4_quantize",
    "E2M1 codes with a power-of-two scale for each 32 neighbours in a row.",
    axes=_axes(2),
    inputs={"a": _matrix("a")},
    constraints=["hidden_size % 32 == 0"],
    tags=["status:verified", "quantize"],
    reference=_mxfp4_quantize_reference,
    check=same_bits,
    init=_widened("a"),
    options={**_LAYOUT, **_CUDA},
)

silu_and_mul_nvfp4_quantize_trace = _quantize_trace(
    "silu_and_mul_nvfp4_quantize",
    "nvfp4_quantize of a gated activation.",
    axes=_axes(4),
    inputs={"input": _matrix("input"), "global_scale": _global_scale("global_scale")},
    constraints=["hidden_size % 32 == 0"],
    tags=["status:verified", "quantize", "fused"],
    reference=_silu_and_mul_nvfp4_quantize_reference,
    check=neighbouring_fp4,
    init=_widened("input"),
    options={"sf_vec_size": (16,), **_FLAGS, **_NO_4OVER6},
)


def _random_codes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Codes of any value and scales that are no NaN, in the layout of the default."""
    packed, scales, block = "e2m1_tensor", "ufp8_scale_tensor", 16
    if "a_fp4" in arguments:
        packed, scales, block = "a_fp4", "a_sf", 32
    elif "weight" in arguments:
        packed, scales, block = "weight", "scale", 32
    source = torch.cat([arguments[packed].float() - 127] * 32, dim=-1)
    layout = 2 if packed == "weight" else 0
    codes, sf = _fp4(torch.cat([source, source], dim=-1), 1.0, block, block == 32, layout)
    return arguments | {packed: codes, scales: sf}


def _dequantize_trace(name: str, packed: str, scales: str, **properties: Any) -> TraceTemplate:
    inputs = {
        packed: Tensor(["num_tokens", "num_bytes"], dtype="uint8", ranks=range(1, 9)),
        scales: Tensor(["scale_rows", "scale_cols"], dtype="uint8", ranks=range(1, 9)),
    } | properties.pop("inputs", {})
    return TraceTemplate(
        op_type="fp4_dequantize",
        name_prefix=name,
        description="Values of E2M1 codes with block scales.",
        axes={
            "num_tokens": Var("Rows."),
            "num_bytes": Const("Bytes of a row, two codes each.", abbrev="b"),
            "scale_rows": Var("Rows of scales."),
            "scale_cols": Var("Scales of a row."),
            "hidden_size": Const(
                "Elements of a row.", abbrev="", derive=lambda sizes: 2 * sizes["num_bytes"]
            ),
        }
        | properties.pop("axes", {}),
        inputs=inputs,
        outputs={"output": Tensor(_ROWS, dtype="float32")},
        tags=["status:verified", "quantize", "host"],
        init=_random_codes,
        **properties,
    )


e2m1_and_ufp8sf_scale_to_float_trace = _dequantize_trace(
    "e2m1_and_ufp8sf_scale_to_float",
    "e2m1_tensor",
    "ufp8_scale_tensor",
    axes={
        "one": Const("", abbrev="", value=1),
    },
    inputs={"global_scale_tensor": _global_scale("global_scale_tensor", optional=True)},
    reference=_e2m1_and_ufp8sf_scale_to_float_reference,
    options={"sf_vec_size": (16, 32), "ufp8_type": (1, 0), **_FLAGS},
)

mxfp4_dequantize_trace = _dequantize_trace(
    "mxfp4_dequantize",
    "a_fp4",
    "a_sf",
    reference=_mxfp4_dequantize_reference,
    options=_LAYOUT,
)

mxfp4_dequantize_host_trace = _dequantize_trace(
    "mxfp4_dequantize_host",
    "weight",
    "scale",
    axes={"group_size": Const("Elements of a block.", abbrev="g", value=32)},
    constraints=["group_size > 0", "hidden_size % group_size == 0"],
    reference=_mxfp4_dequantize_host_reference,
)


def _interleave_trace(name: str) -> TraceTemplate:
    return TraceTemplate(
        op_type="fp4_quantize",
        name_prefix=name,
        description="Row-major block scales in tiles of 128 rows by 4 blocks.",
        axes={
            "num_rows": Var("Rows of scales, of all experts."),
            "num_blocks": Const("Scales of a row.", abbrev="b"),
            "num_scales": Var("Scales, padding included.", from_values=True),
        },
        inputs={
            "unswizzled_sf": Tensor(
                ["num_rows", "num_blocks"],
                ranks=(2, 3),
                dtypes=("uint8", "float8_e4m3fn", "float8_e8m0fnu", "bfloat16"),
            )
        },
        outputs={"output": Tensor(["num_scales"], param="out", dtype_from="unswizzled_sf")},
        tags=["status:verified", "quantize", "host"],
        reference=_block_scale_interleave_reference,
        check=same_bits,
        init=lambda arguments: {"unswizzled_sf": arguments["unswizzled_sf"].to(torch.bfloat16)},
    )


block_scale_interleave_trace = _interleave_trace("block_scale_interleave")
nvfp4_block_scale_interleave_trace = _interleave_trace("nvfp4_block_scale_interleave")
