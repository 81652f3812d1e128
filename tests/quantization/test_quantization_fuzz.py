"""Quantisation under random dtypes, shapes, strides, alignments, layouts and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import quantization
from flashinfer.jit import JitSpec
from flashinfer.jit.quantization import LAYOUTS as SCALE_LAYOUTS
from flashinfer.jit.quantization import (
    GroupQuantConfig,
    PackBitsConfig,
    gen_group_quant_module,
    gen_packbits_module,
)
from flashinfer.quantization import SfLayout
from tests.fuzzing import (
    FLOATING,
    LAYOUTS,
    Family,
    Fault,
    Layout,
    check_fault,
    empty_in_layout,
    put,
    replace,
    run_fuzz,
    strided,
    with_dtype,
)

GROUPS = "per_token_group_quant_8bit"
GATED = "silu_and_mul_per_token_group_quant_8bit"
FP4 = ("fp4_quantize", "nvfp4_quantize", "mxfp4_quantize")
BITS = ("packbits", "segment_packbits")
MATRICES = (
    "nvfp4_batched_quantize",
    "scaled_fp4_grouped_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
    "mxfp8_grouped_quantize",
)
FUNCTIONS = (GROUPS, GATED, "mxfp8_quantize", *FP4, *MATRICES, *BITS)
CODES = (None, torch.float8_e5m2, torch.int8)
GROUP_SIZES = (16, 40, 128)


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    dtype: torch.dtype
    rows: tuple[int, ...]
    groups: int
    group_size: int
    layout: Layout
    dst_dtype: torch.dtype | None
    scales: SfLayout
    flag: bool  # power-of-two scales, padding, or the other bit order
    aligned: bool
    spread: float
    special: str
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.sampled_from([(0,), (1,), (2,), (5,), (127,), (130,), (3, 7), (2, 3, 5), ()]))
    return Case(
        function=draw(st.sampled_from(FUNCTIONS)),
        dtype=draw(st.sampled_from(FLOATING)),
        rows=rows,
        groups=draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 31, 32, 56])),
        group_size=draw(st.sampled_from(GROUP_SIZES)),
        layout=draw(LAYOUTS),
        dst_dtype=draw(st.sampled_from(CODES)),
        scales=draw(st.sampled_from(list(SfLayout))),
        flag=draw(st.booleans()),
        aligned=draw(st.booleans()),
        spread=draw(st.sampled_from([1e-4, 1.0, 1.0, 300.0])),
        special=draw(st.sampled_from(["", "", "zero", "tie", "nan", "inf"])),
        seed=draw(st.integers(0, 2**31)),
    )


def _values(case: Case, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(case.seed)
    layout = Layout(case.layout.offset, case.layout.gap)
    tensor = empty_in_layout(shape, layout, case.dtype, device)
    values = torch.randn(shape, generator=generator, device=device) * case.spread
    exact = case.function in (GROUPS, "mxfp8_quantize")
    if case.special == "tie":  # small whole numbers: quotients that lie halfway are common
        values = values.div(case.spread).mul(20).round()
    if values.numel() and (case.special == "zero" or (case.special in ("nan", "inf") and exact)):
        flat = values.view(-1, shape[-1]) if len(shape) > 1 else values.view(1, -1)
        flat[0, : 1 if case.special != "zero" else shape[-1]] = float(
            case.special.replace("zero", "0")
        )
    return tensor.copy_(values)


def _bits(case: Case, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(case.seed)
    lengths = torch.randint(0, 2 + 37 * case.groups, (1 + case.groups,), generator=generator)
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    offset = case.layout.offset
    mask = torch.rand(offset + int(indptr[-1]), generator=generator) < 0.4
    dtype = (torch.bool, torch.uint8, torch.float32)[case.seed % 3]
    arguments: dict[str, Any] = {"x": mask.to(dtype).to(device)[offset:]}
    arguments["bitorder"] = "little" if case.flag else "big"
    if case.function == "segment_packbits":
        where = device if case.aligned else "cpu"
        index = torch.int32 if case.seed % 2 else torch.int64
        arguments["indptr"] = indptr.to(where, index)
    return arguments


def _matrices(case: Case, device: torch.device) -> dict[str, Any]:
    """Matrices of as many rows as the last number of `case.rows`, and how many of them count."""
    name = case.function
    block = {"mxfp8_grouped_quantize": 32, MATRICES[2]: 32}.get(name, 16)
    batch, rows = (case.rows or (3,))[:-1], (case.rows or (3,))[-1]
    shape = (batch[-1] if batch else case.seed % 4, rows, block * case.groups)
    arguments: dict[str, Any] = {"a": _values(case, shape, device)}
    generator = torch.Generator().manual_seed(case.seed)
    if name != MATRICES[0]:
        counts = torch.randint(-1, rows + 2, shape[:1], generator=generator)
        arguments["mask"] = counts.to(device, torch.int32)
    if name != MATRICES[3]:
        count = 1 if case.aligned else shape[0]
        arguments["a_global_sf"] = torch.rand(count, generator=generator).add(0.01).to(device)
    return arguments


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    if case.function in BITS:
        return _bits(case, device)
    if case.function in MATRICES:
        return _matrices(case, device)
    if case.function in (GROUPS, GATED):
        width = case.groups * case.group_size * (2 if case.function == GATED else 1)
        arguments: dict[str, Any] = {
            "x": _values(case, (*case.rows, width), device),
            "group_size": case.group_size,
            "scale_ue8m0": case.flag and case.function == GROUPS,
            "eps": (1e-10, 1e-4, 3.0)[case.seed % 3],
        }
        if case.function == GROUPS:
            arguments["dst_dtype"] = case.dst_dtype
        if len(case.rows) == 1:
            arguments["column_major_scales"] = case.scales != SfLayout.layout_linear
            arguments["scale_tma_aligned"] = case.scales == SfLayout.layout_8x4
        return arguments
    pdl = (None, True, False)[case.seed % 3]
    if case.function == "mxfp8_quantize":
        input = _values(case, (*case.rows, 32 * case.groups), device)
        alignment = 128 if case.flag else 32
        return {
            "input": input,
            "alignment": alignment,
            "sf_swizzle_layout": case.scales,
            "enable_pdl": pdl,
        }
    block = 32 if case.function == "mxfp4_quantize" or case.group_size == 40 else 16
    block = 16 if case.function == "nvfp4_quantize" else block
    name = "input" if case.function == "fp4_quantize" else "a"
    arguments = {name: _values(case, (*case.rows, block * case.groups), device), "enable_pdl": pdl}
    scale = torch.full((1,), (1.0, 37.5, 0.01)[case.seed % 3], device=device)
    if case.function == "mxfp4_quantize":
        return arguments | {"sfLayout": case.scales}
    if case.function == "nvfp4_quantize":
        return arguments | {"a_global_sf": scale, "sfLayout": case.scales}
    return arguments | {
        "global_scale": scale if case.aligned else None,
        "sf_vec_size": block,
        "sf_use_ue8m0": case.flag,
        "is_sf_swizzled_layout": case.scales != SfLayout.layout_linear,
        "is_sf_8x4_layout": case.scales == SfLayout.layout_8x4,
        "is_global_scale_inversed": case.aligned and case.seed % 2 == 0,
    }


def _one_more_column(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 1))


def _two(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_ones(2)


FAULTS: dict[str, Fault] = {
    "group_size zero": put("group_size", 0),
    "group_size negative": put("group_size", -16),
    "group_size a float": put("group_size", 16.0),
    "group_size none": put("group_size", None),
    "eps zero": put("eps", 0.0),
    "eps negative": put("eps", -1e-10),
    "eps not a number": put("eps", float("nan")),
    "eps infinite": put("eps", float("inf")),
    "eps text": put("eps", "1e-10"),
    "dst_dtype bfloat16": put("dst_dtype", torch.bfloat16),
    "dst_dtype text": put("dst_dtype", "float8_e4m3fn"),
    "dst_dtype uint8": put("dst_dtype", torch.uint8),
    "column_major_scales a number": put("column_major_scales", 1),
    "scale_tma_aligned text": put("scale_tma_aligned", "yes"),
    "scale_ue8m0 none": put("scale_ue8m0", None),
    "alignment zero": put("alignment", 0),
    "alignment 48": put("alignment", 48),
    "alignment a float": put("alignment", 32.0),
    "sf_swizzle_layout 3": put("sf_swizzle_layout", 3),
    "sf_swizzle_layout text": put("sf_swizzle_layout", "linear"),
    "sfLayout 5": put("sfLayout", 5),
    "sfLayout none": put("sfLayout", None),
    "sf_vec_size 8": put("sf_vec_size", 8),
    "sf_vec_size text": put("sf_vec_size", "16"),
    "sf_use_ue8m0 a number": put("sf_use_ue8m0", 1),
    "is_sf_swizzled_layout none": put("is_sf_swizzled_layout", None),
    "is_sf_8x4_layout a number": put("is_sf_8x4_layout", 0),
    "is_global_scale_inversed none": put("is_global_scale_inversed", None),
    "enable_pdl text": put("enable_pdl", "yes"),
    "enable_pdl a number": put("enable_pdl", 1),
    "bitorder middle": put("bitorder", "middle"),
    "bitorder none": put("bitorder", None),
    "indptr missing": put("indptr", None),
    "indptr of floats": replace("indptr", with_dtype(torch.float32)),
    "indptr too short": replace("indptr", lambda t: t[:-1] if t[-1] != t[-2] else None),
    "indptr from one": replace("indptr", lambda t: t + 1),
    "indptr two-dimensional": replace("indptr", lambda t: t[None]),
    "indptr empty": replace("indptr", lambda t: t[:0]),
    "indptr falling": replace(
        "indptr", lambda t: torch.cat([t, t.new_tensor([0]), t[-1:]]) if t[-1] else None
    ),
    "global_scale with two elements": replace("global_scale", _two),
    "global_scale of integers": replace("global_scale", with_dtype(torch.int32)),
    "global_scale a number": put("global_scale", 1.0),
    "mask missing": put("mask", None),
    "mask of floats": replace("mask", with_dtype(torch.float32)),
    "mask too long": replace("mask", lambda t: torch.cat([t, t, t.new_zeros(1)])),
    "mask two-dimensional": replace("mask", lambda t: t[None]),
    "a_global_sf of many": replace("a_global_sf", lambda t: t.new_ones(99)),
    "a_global_sf missing": put("a_global_sf", None),
    "a_global_sf a number": put("a_global_sf", 1.0),
}
for _name in ("x", "input", "a"):
    FAULTS |= {
        f"{_name} missing": put(_name, None),
        f"{_name} a list": put(_name, [1.0]),
        f"{_name} of complex numbers": replace(_name, with_dtype(torch.complex64)),
        f"{_name} strided": replace(_name, strided),
        f"{_name} a scalar": replace(_name, lambda t: t.new_zeros(())),
    }
for _name in ("input", "a"):
    FAULTS |= {
        f"{_name} of integers": replace(_name, with_dtype(torch.int32)),
        f"{_name} of doubles": replace(_name, with_dtype(torch.float64)),
        f"{_name} with a broken group": replace(_name, _one_more_column),
    }


def _broken_group(arguments: dict[str, Any]) -> dict[str, Any] | None:
    if "group_size" not in arguments:
        return None
    return {**arguments, "x": _one_more_column(arguments["x"])}


def _tma_without_columns(arguments: dict[str, Any]) -> dict[str, Any] | None:
    if "group_size" not in arguments:
        return None
    return {**arguments, "scale_tma_aligned": True, "column_major_scales": False}


def _columns_of_a_cube(arguments: dict[str, Any]) -> dict[str, Any] | None:
    if "group_size" not in arguments or arguments["x"].numel() == 0:
        return None
    x = arguments["x"].reshape(1, -1, arguments["x"].shape[-1])
    return {**arguments, "x": x, "column_major_scales": True}


def _doubles(arguments: dict[str, Any]) -> dict[str, Any] | None:
    return {**arguments, "x": arguments["x"].double()} if "group_size" in arguments else None


def _eight_by_four_unswizzled(arguments: dict[str, Any]) -> dict[str, Any] | None:
    if "is_sf_8x4_layout" not in arguments:
        return None
    return {**arguments, "is_sf_swizzled_layout": False, "is_sf_8x4_layout": True}


FAULTS |= {
    "x with a broken group": _broken_group,
    "x of doubles": _doubles,
    "scale_tma_aligned in rows": _tma_without_columns,
    "column_major_scales of a cube": _columns_of_a_cube,
    "is_sf_8x4_layout unswizzled": _eight_by_four_unswizzled,
    "nvfp4_4over6 given": lambda a: {**a, "nvfp4_4over6": 1} if "a_global_sf" in a else None,
    "do_shuffle true": lambda a: {**a, "do_shuffle": True} if "a_global_sf" in a else None,
    "per_token_activation true": lambda a: (
        {**a, "per_token_activation": True} if "a_global_sf" in a else None
    ),
    "backend cute-dsl": lambda a: {**a, "backend": "cute-dsl"} if "enable_pdl" in a else None,
}


USUAL = (5,), 4, 16, Layout(), None, SfLayout.layout_128x4, False, True, 1.0, "", 1


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    return build(Case(function, torch.bfloat16, *USUAL), device)


def specs() -> list[JitSpec]:
    configs = []
    tiled = (SCALE_LAYOUTS[0], *SCALE_LAYOUTS[2:])
    for dtype in FLOATING:
        for layout in SCALE_LAYOUTS[:2]:
            for size in GROUP_SIZES:
                for scale in ("float32", "power_of_two_float32"):
                    for code in ("e4m3", "e5m2", "int8"):
                        configs.append(GroupQuantConfig(dtype, code, scale, layout, size))
                configs.append(GroupQuantConfig(dtype, "e4m3", "float32", layout, size, True))
        for layout in tiled:
            configs.append(GroupQuantConfig(dtype, "e4m3", "ue8m0", layout, 32))
            for scale in ("e4m3", "ue8m0"):
                for size in (16, 32):
                    configs.append(GroupQuantConfig(dtype, "e2m1", scale, layout, size))
        configs.append(GroupQuantConfig(dtype, "e2m1", "e4m3", tiled[1], 16, True))
    groups = [gen_group_quant_module(config) for config in configs]
    indices = ("none", "int32", "int64")
    return groups + [gen_packbits_module(PackBitsConfig(index)) for index in indices]


FAMILY = Family("quantization", quantization, FUNCTIONS, cases(), build, usual, FAULTS, specs=specs)


def test_codes_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
