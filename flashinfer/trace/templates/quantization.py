"""Templates and references of group quantisation and bit packing.

Codes and scales are exact: the references do the same correctly rounded float32 operations as the
kernels, and results must agree bit for bit. Only where an activation comes first, which kernels may
compute with approximations, may a code be a neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..._common.dtypes import torch_name
from ...tllm_enums import SfLayout
from ..specs import FLOATING, Axis, Const, Scalar, Tensor, Var
from ..template import TraceTemplate
from .block_scales import (
    divide,
    least_exponent,
    mx_codes,
    neighbouring_codes,
    same_bits,
    swizzle,
    to_8bit,
    unswizzle,
)

# ---- bit packing -------------------------------------------------------------------------------


def _packbits_reference(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """packed[i] = sum over j of (x[8 i + j] != 0) * 2^j, or 2^(7 - j) for the order "big".

    Source: `packbits` of NumPy.
    """
    bits = (x != 0).long()
    padded = torch.cat([bits, bits.new_zeros(-bits.numel() % 8)]).reshape(-1, 8)
    place = torch.arange(8, device=x.device)
    return (padded << (7 - place if bitorder == "big" else place)).sum(-1).to(torch.uint8)


def _segment_packbits_reference(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """packed = packbits of each segment x[indptr[i] : indptr[i + 1]], one after the other.

    Source: `packbits` of NumPy.
    """
    bounds = indptr.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != x.numel() or bounds != sorted(bounds):
        raise ValueError(f"`indptr` must rise from 0 to the length of `x`, {x.numel()}")
    parts = [
        _packbits_reference(x[begin:end], bitorder)
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]
    sizes = torch.tensor([0, *(part.numel() for part in parts)], device=x.device)
    empty = torch.empty(0, dtype=torch.uint8, device=x.device)
    return torch.cat([empty, *parts]), sizes.cumsum(0).to(indptr.dtype)


# ---- 8-bit codes -------------------------------------------------------------------------------


def _group_quant_8bit(
    x: torch.Tensor, group_size: int, eps: float, dtype: torch.dtype, ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of groups in the last dimension of `x`, float32."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    amax = groups.abs().amax(-1).clamp(min=eps) if x.numel() else groups.sum(-1)
    scale = divide(amax, largest)
    if ue8m0:
        finite = torch.where(amax.isfinite(), amax, 1.0)
        power = torch.exp2(least_exponent(finite, largest).double()).float()
        scale = torch.where(amax.isfinite(), power, amax)
    codes = to_8bit(groups / scale[..., None], dtype)
    return codes.reshape(x.shape), scale


def _check_scale_layout(x: torch.Tensor, column_major: bool, tma_aligned: bool) -> None:
    if tma_aligned and not column_major:
        raise ValueError("`scale_tma_aligned` needs `column_major_scales`")
    if column_major and x.ndim != 2:
        raise ValueError(f"`x` must have 2 dimensions for `column_major_scales`, got {x.ndim}")


def _in_scale_layout(
    results: tuple[torch.Tensor, torch.Tensor], column_major: bool, tma_aligned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, which lie column by column if asked for, each of whole fours of rows."""
    codes, scale = results
    if column_major:
        rows, groups = scale.shape
        columns = scale.new_zeros(groups, -(-rows // 4) * 4 if tma_aligned else rows)
        columns[:, :rows] = scale.t()
        scale = columns[:, :rows].t()
    return codes, scale


def _per_token_group_quant_8bit_reference(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """scale = max(amax of the group, eps) / qmax; x_q = x / scale, rounded to nearest even.

    With scale_ue8m0 the scale is rounded up to a power of two. Source: DeepSeek-AI, "DeepSeek-V3
    Technical Report", 2024, section 3.3.2.
    """
    _check_scale_layout(x, column_major_scales, scale_tma_aligned)
    dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    results = _group_quant_8bit(x.float(), group_size, eps, dtype, scale_ue8m0)
    return _in_scale_layout(results, column_major_scales, scale_tma_aligned)


def _silu_and_mul_per_token_group_quant_8bit_reference(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y = silu(gate) * up, rounded to the dtype of x; then as per_token_group_quant_8bit.

    Source: N. Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    _check_scale_layout(x, column_major_scales, scale_tma_aligned)
    gate, up = x.double().chunk(2, dim=-1)
    y = (gate * torch.sigmoid(gate) * up).to(x.dtype).float()
    dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
    results = _group_quant_8bit(y, group_size, eps, dtype, scale_ue8m0)
    return _in_scale_layout(results, column_major_scales, scale_tma_aligned)


def _mxfp8_quantize_reference(
    input: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    sf_swizzle_layout: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """scale = 2^ceil(log2(amax / 448)) of each 32 elements; x_q = input / scale in E4M3.

    Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification 1.0", 2023.
    """
    width = -(-input.shape[-1] // alignment) * alignment
    padded = torch.nn.functional.pad(input.float(), (0, width - input.shape[-1]))
    quotients, scales = mx_codes(padded, 32, 448.0)
    layout = (0 if is_sf_swizzled_layout else 2) if sf_swizzle_layout is None else sf_swizzle_layout
    codes = to_8bit(quotients, torch.float8_e4m3fn)
    return codes.reshape(padded.shape), swizzle(scales, layout)


def _mxfp8_dequantize_host_reference(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    sf_swizzle_layout: int | None = None,
) -> torch.Tensor:
    """output = input * 2^(scale - 127), a scale for each 32 elements.

    Source: as mxfp8_quantize.
    """
    layout = (0 if is_sf_swizzled_layout else 2) if sf_swizzle_layout is None else sf_swizzle_layout
    values = input.view(torch.float8_e4m3fn).double().reshape(-1, input.shape[-1] // 32, 32)
    codes = unswizzle(scale_tensor, layout, values.shape[0], values.shape[1])
    scale = torch.exp2(codes.double() - 127)
    scale[codes == 255] = math.nan
    return (values * scale[..., None]).reshape(input.shape)


# ---- templates ---------------------------------------------------------------------------------


def _widened(param: str, factor: int) -> Any:
    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments | {param: torch.cat([arguments[param]] * factor, dim=-1)}

    return init


_REAL = ("bool", "uint8", "int8", "int16", "int32", "int64", *FLOATING, "float64")
_BITORDER = {"bitorder": ("big", "little")}
_ROWS = ["num_tokens", "hidden_size"]
_EPS = Scalar(above=0, description="Least magnitude that a scale is made for.")


def _matrix(param: str, **properties: Any) -> Tensor:
    return Tensor(
        _ROWS, param=param, dtypes=FLOATING, ranks=range(1, 9), layout="matrix", **properties
    )


packbits_trace = TraceTemplate(
    op_type="packbits",
    name_prefix="packbits",
    description="Eight elements, zero or not, to a byte.",
    axes={
        "num_elements": Var("Elements, one bit each."),
        "num_bytes": Var("An eighth of that, rounded up.", from_values=True),
    },
    inputs={"x": Tensor(["num_elements"], layout="rows", dtypes=_REAL)},
    outputs={"packed": Tensor(["num_bytes"], dtype="uint8")},
    tags=["status:verified", "quantize"],
    reference=_packbits_reference,
    options=_BITORDER,
)


def _segments(arguments: dict[str, Any]) -> dict[str, Any]:
    length = arguments["x"].shape[0]
    count = arguments["indptr"].shape[0]
    indptr = torch.linspace(0, length, count, device=arguments["x"].device).int()
    return arguments | {"indptr": indptr}


segment_packbits_trace = TraceTemplate(
    op_type="packbits",
    name_prefix="segment_packbits",
    description="packbits of segments of a vector, each from a byte of its own.",
    axes={
        "num_elements": Var("Elements, one bit each."),
        "len_indptr": Var("Segments plus one."),
        "num_bytes": Var("Sum of the packed segments' lengths.", from_values=True),
    },
    inputs={
        "x": Tensor(["num_elements"], layout="rows", dtypes=_REAL),
        "indptr": Tensor(["len_indptr"], dtypes=("int32", "int64"), description="Segment bounds."),
    },
    outputs={
        "packed": Tensor(["num_bytes"], dtype="uint8"),
        "packed_indptr": Tensor(["len_indptr"], dtype_from="indptr"),
    },
    tags=["status:verified", "quantize"],
    reference=_segment_packbits_reference,
    init=_segments,
    # Segments are padded by their values: a compiled graph has a size that it does not know.
    predict=lambda arguments: {"num_bytes": torch.library.get_ctx().new_dynamic_size()},
    options=_BITORDER,
)


def _group_axes(width: int) -> dict[str, Axis]:
    """`width` input elements make one output element."""

    def out_size(sizes: Mapping[str, int]) -> int:
        return sizes["hidden_size"] // width

    def num_groups(sizes: Mapping[str, int]) -> int:
        return sizes["hidden_size"] // width // (sizes["group_size"] or 1)

    return {
        "num_tokens": Var("Rows."),
        "hidden_size": Const("Elements of an input row.", abbrev="h"),
        "group_size": Const("Neighbours in a row that share a scale.", abbrev="g"),
        "out_size": Const("Elements of an output row.", abbrev="", derive=out_size),
        "num_groups": Const("Groups of an output row.", abbrev="", derive=num_groups),
    }


def _group_quant_trace(dtype: torch.dtype, *, silu_and_mul: bool) -> TraceTemplate:
    operation = "per_token_group_quant_8bit"
    reference: Any = _per_token_group_quant_8bit_reference
    options: dict[str, tuple[Any, ...]] = {"backend": ("cutile", "cuda")}
    if silu_and_mul:
        operation = f"silu_and_mul_{operation}"
        reference = _silu_and_mul_per_token_group_quant_8bit_reference
        options = {}
    is_default = dtype == torch.float8_e4m3fn
    name = torch_name(dtype)
    options |= {
        "dst_dtype": (None, dtype) if is_default else (dtype,),
        "column_major_scales": (False, True),
        "scale_tma_aligned": (False, True),
        "scale_ue8m0": (False, True),
    }
    width = 2 if silu_and_mul else 1

    def init(arguments: dict[str, Any]) -> dict[str, Any]:
        x = torch.cat([arguments["x"]] * 16, dim=-1)
        chosen = {} if is_default else {"dst_dtype": dtype}
        return arguments | chosen | {"group_size": 8, "x": x}

    return TraceTemplate(
        op_type="group_quantize",
        name_prefix=operation if is_default else f"{operation}_{name}",
        description="A scale for each group of neighbours in a row, and 8-bit codes of quotients"
        + (", after the gated activation." if silu_and_mul else "."),
        axes=_group_axes(width),
        inputs={"x": _matrix("x"), "eps": _EPS},
        outputs={
            "x_q": Tensor(["num_tokens", "out_size"], dtype=name),
            "scale": Tensor(["num_tokens", "num_groups"], dtype="float32", keeps_strides=True),
        },
        constraints=[f"group_size > 0 and hidden_size % ({width} * group_size) == 0"],
        tags=["status:verified", "quantize", *(["fused"] if silu_and_mul else [])],
        reference=reference,
        check=neighbouring_codes if silu_and_mul else same_bits,
        init=init,
        has_own_strides=True,
        options=options,
    )


_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_PLAIN = {d: _group_quant_trace(d, silu_and_mul=False) for d in _DTYPES}
_SILU = {d: _group_quant_trace(d, silu_and_mul=True) for d in _DTYPES}


def per_token_group_quant_8bit_trace(**arguments: Any) -> TraceTemplate | None:
    """The template of a call, by its dtype of codes."""
    return _PLAIN.get(arguments.get("dst_dtype") or torch.float8_e4m3fn, _PLAIN[_DTYPES[0]])


def silu_and_mul_per_token_group_quant_8bit_trace(**arguments: Any) -> TraceTemplate | None:
    """The template of a call, by its dtype of codes."""
    return _SILU.get(arguments.get("dst_dtype") or torch.float8_e4m3fn, _SILU[_DTYPES[0]])


per_token_group_quant_8bit_trace.templates = list(_PLAIN.values())  # type: ignore[attr-defined]
silu_and_mul_per_token_group_quant_8bit_trace.templates = list(  # type: ignore[attr-defined]
    _SILU.values()
)


def _padded_size(sizes: Mapping[str, int]) -> int:
    alignment = max(sizes["alignment"], 1)  # whether it is allowed is checked later
    return -(-sizes["hidden_size"] // alignment) * alignment


_SWIZZLE: dict[str, tuple[Any, ...]] = {
    "is_sf_swizzled_layout": (True, False),
    "sf_swizzle_layout": (None, *SfLayout, *map(int, SfLayout)),
}

mxfp8_quantize_trace = TraceTemplate(
    op_type="mx_quantize",
    name_prefix="mxfp8_quantize",
    description="E4M3 codes with a power-of-two scale for each 32 neighbours in a row.",
    axes={
        "num_tokens": Var("Rows."),
        "hidden_size": Const("Elements of a row.", abbrev="h"),
        "alignment": Const("What rows are padded to.", abbrev="", value=32),
        "padded_size": Const(
            "Elements of an output row.",
            abbrev="",
            derive=_padded_size,
        ),
        "num_scales": Var("Scales, padding of their layout included.", from_values=True),
    },
    inputs={"input": _matrix("input")},
    outputs={
        "x_q": Tensor(["num_tokens", "padded_size"], dtype="float8_e4m3fn"),
        "sf": Tensor(["num_scales"], dtype="uint8", description="Exponents plus 127."),
    },
    constraints=["hidden_size % 32 == 0", "alignment > 0 and alignment % 32 == 0"],
    tags=["status:verified", "quantize"],
    reference=_mxfp8_quantize_reference,
    check=same_bits,
    init=_widened("input", 32),
    hints=["enable_pdl"],
    options={"backend": ("cuda",), **_SWIZZLE},
)


def _scales_of_blocks(arguments: dict[str, Any]) -> dict[str, Any]:
    """Codes that are no NaN, scales in the layout of the default."""
    source = torch.cat([arguments["input"].float()] * 32, dim=-1)
    x_q, sf = _mxfp8_quantize_reference(source)
    return arguments | {"input": x_q, "scale_tensor": sf}


mxfp8_dequantize_host_trace = TraceTemplate(
    op_type="mx_dequantize",
    name_prefix="mxfp8_dequantize_host",
    description="The inverse of mxfp8_quantize.",
    axes={
        "num_tokens": Var("Rows."),
        "hidden_size": Const("Elements of a row.", abbrev="h"),
        "num_scales": Var("Scales, padding of their layout included."),
    },
    inputs={
        "input": Tensor(_ROWS, dtypes=("float8_e4m3fn", "uint8"), ranks=range(1, 9)),
        "scale_tensor": Tensor(["num_scales"], dtype="uint8", ranks=range(1, 9)),
    },
    outputs={"output": Tensor(_ROWS, dtype="float32")},
    constraints=["hidden_size % 32 == 0"],
    tags=["status:verified", "quantize", "host"],
    reference=_mxfp8_dequantize_host_reference,
    init=_scales_of_blocks,
    options=_SWIZZLE,
)
