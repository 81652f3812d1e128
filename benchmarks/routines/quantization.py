"""Quantisation in groups and blocks, bit packing, and the fusions that end in codes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from flashinfer import SfLayout
from flashinfer.testing import make_tensor

from .base import Arguments, Backend, Flag, Routine, dtype_name, positive, register, torch_dtype

_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
_ROWS = Flag("batch_size", positive, 16384, "rows (tokens)")
_WIDTH = Flag("hidden_size", positive, 7168, "elements of a row that is quantised")
_DTYPE = Flag("input_dtype", dtype_name, "bfloat16", "dtype of the input")
_SHAPE = [_ROWS, _WIDTH, _DTYPE]


def _code(text: str) -> str:
    """Format of the codes of `per_token_group_quant_8bit`."""
    if text not in _CODES:
        raise ValueError(f"{text!r} is no format; use one of {', '.join(_CODES)}")
    return text


_GROUPS = [
    Flag("group_size", positive, 128, "elements that share a scale"),
    Flag("code", _code, "e4m3", "format of the codes: e4m3, e5m2 or int8"),
    Flag("column_major_scales", bool, False, "scales of neighbouring rows next to each other"),
    Flag("scale_ue8m0", bool, False, "scales rounded up to powers of two"),
]


def _input(case: Namespace, device: str, factor: int = 1) -> torch.Tensor:
    dtype = torch_dtype(case.input_dtype)
    return make_tensor(case.batch_size, factor * case.hidden_size, dtype=dtype, device=device)


def _eager_groups(
    x: torch.Tensor, group_size: int, dst_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().unflatten(-1, (-1, group_size))
    largest = 127.0 if dst_dtype == torch.int8 else torch.finfo(dst_dtype).max
    amax = groups.abs().amax(-1).clamp(min=1e-10)
    scale = amax / torch.full_like(amax, largest)
    codes = groups / scale[..., None]
    codes = codes.round() if dst_dtype == torch.int8 else codes
    return codes.clamp(-largest, largest).to(dst_dtype).reshape(x.shape), scale


def _group_quant(name: str, factor: int) -> None:
    def build(case: Namespace, device: str) -> Arguments:
        return {
            "x": _input(case, device, factor),
            "group_size": case.group_size,
            "dst_dtype": _CODES[case.code],
            "column_major_scales": case.column_major_scales,
            "scale_ue8m0": case.scale_ue8m0,
        }

    def fresh(arguments: Arguments) -> int:
        codes = arguments["x"].numel() // factor
        return codes + 4 * codes // arguments["group_size"]

    api = f"flashinfer.quantization:{name}"
    backends = {"cuda": Backend(api)}
    if factor == 1:
        omits = ("column_major_scales", "scale_ue8m0")
        backends["torch"] = Backend(_eager_groups, omits=omits)
    register(
        Routine(
            name=name,
            api=api,
            flags=[*_SHAPE, *_GROUPS],
            build=build,
            reads=["x"],
            writes=[],
            fresh=fresh,
            backends=backends,
        )
    )


_group_quant("per_token_group_quant_8bit", 1)
_group_quant("silu_and_mul_per_token_group_quant_8bit", 2)

_LAYOUT = Flag("linear_scales", bool, False, "scales in rows instead of tiles of 128x4")


def _block_quant(name: str, argument: str, block: int, bits: int, factor: int = 1) -> None:
    def build(case: Namespace, device: str) -> Arguments:
        arguments: dict[str, Any] = {argument: _input(case, device, factor)}
        if name not in ("mxfp4_quantize", "mxfp8_quantize"):
            scale = "a_global_sf" if argument == "a" else "global_scale"
            arguments[scale] = torch.full((1,), 600.0, device=device)
        if argument == "a":
            layout = SfLayout.layout_linear if case.linear_scales else SfLayout.layout_128x4
            return arguments | {"sfLayout": layout}
        return arguments | {"is_sf_swizzled_layout": not case.linear_scales}

    def fresh(arguments: Arguments) -> int:
        codes = arguments[argument].numel() // factor
        return codes * bits // 8 + codes // block

    api = f"flashinfer.quantization:{name}"
    register(
        Routine(
            name=name,
            api=api,
            flags=[*_SHAPE, _LAYOUT],
            build=build,
            reads=[argument],
            writes=[],
            fresh=fresh,
        )
    )


_block_quant("mxfp8_quantize", "input", 32, 8)
_block_quant("mxfp4_quantize", "a", 32, 4)
_block_quant("fp4_quantize", "input", 16, 4)
_block_quant("nvfp4_quantize", "a", 16, 4)
_block_quant("silu_and_mul_nvfp4_quantize", "input", 16, 4, factor=2)

_EXPERTS = Flag("num_experts", positive, 8, "matrices among which the rows are divided")


def _experts_quant(name: str, block: int, bits: int, *, masked: bool, factor: int = 1) -> None:
    def build(case: Namespace, device: str) -> Arguments:
        experts, rows = case.num_experts, max(case.batch_size // case.num_experts, 1)
        dtype, columns = torch_dtype(case.input_dtype), factor * case.hidden_size
        arguments: dict[str, Any] = {
            "a": make_tensor(experts, rows, columns, dtype=dtype, device=device)
        }
        if masked:
            arguments["mask"] = torch.full((experts,), rows, dtype=torch.int32, device=device)
        if bits == 4:
            arguments["a_global_sf"] = torch.full((1,), 600.0, device=device)
        return arguments

    def fresh(arguments: Arguments) -> int:
        codes = arguments["a"].numel() // factor
        return codes * bits // 8 + codes // block

    api = f"flashinfer.quantization:{name}"
    register(
        Routine(
            name=name,
            api=api,
            flags=[*_SHAPE, _EXPERTS],
            build=build,
            reads=["a"],
            writes=[],
            fresh=fresh,
        )
    )


_experts_quant("nvfp4_batched_quantize", 16, 4, masked=False)
_experts_quant("scaled_fp4_grouped_quantize", 16, 4, masked=True)
_experts_quant("mxfp8_grouped_quantize", 32, 8, masked=True)
_experts_quant("silu_and_mul_scaled_nvfp4_experts_quantize", 16, 4, masked=True, factor=2)


def _packbits(case: Namespace, device: str) -> Arguments:
    return {"x": torch.rand(case.num_elements, device=device) < 0.5}


def _segments(case: Namespace, device: str) -> Arguments:
    bounds = torch.arange(0, case.num_elements, case.segment_length, dtype=torch.int64)
    end = torch.tensor([case.num_elements])
    return {**_packbits(case, device), "indptr": torch.cat([bounds, end])}


_ELEMENTS = Flag("num_elements", positive, 2**28, "elements, a byte each")
_SEGMENT = Flag("segment_length", positive, 2**20, "elements of a segment")
for _name, _flags, _build in (
    ("packbits", [_ELEMENTS], _packbits),
    ("segment_packbits", [_ELEMENTS, _SEGMENT], _segments),
):
    register(
        Routine(
            name=_name,
            api=f"flashinfer.quantization:{_name}",
            flags=_flags,
            build=_build,
            reads=["x"],
            writes=[],
            fresh=lambda arguments: arguments["x"].numel() // 8,
            captures=_name == "packbits",
        )
    )


def _norm(case: Namespace, device: str) -> Arguments:
    x = _input(case, device)
    weight = make_tensor(case.hidden_size, dtype=x.dtype, device=device, mean=1.0, std=0.1)
    scales = torch.empty(case.hidden_size // 128, -(-case.batch_size // 4) * 4, device=device)
    return {
        "out": torch.empty_like(x, dtype=torch.float8_e4m3fn),
        "block_scale": scales,
        "input": x,
        "weight": weight,
    }


def _norm_with_residual(case: Namespace, device: str) -> Arguments:
    arguments = _norm(case, device)
    x = arguments["input"]
    return arguments | {"residual": _input(case, device), "normed_out": torch.empty_like(x)}


def _norm_silu(case: Namespace, device: str) -> Arguments:
    arguments = _norm(case, device)
    del arguments["block_scale"]
    return arguments if case.fp8 else arguments | {"out": torch.empty_like(arguments["input"])}


_RESULTS = ["out", "block_scale"]
for _name, _flags, _build, _reads, _writes in (
    ("rmsnorm_fp8_block_quant", [], _norm, ["input", "weight"], _RESULTS),
    (
        "fused_add_rmsnorm_fp8_block_quant",
        [],
        _norm_with_residual,
        ["input", "weight", "residual"],
        [*_RESULTS, "normed_out", "residual"],
    ),
    (
        "fused_rmsnorm_silu",
        [Flag("fp8", bool, False, "result in float8_e4m3fn")],
        _norm_silu,
        ["input", "weight"],
        ["out"],
    ),
):
    register(
        Routine(
            name=_name,
            api=f"flashinfer.norm:{_name}",
            flags=[*_SHAPE, *_flags],
            build=_build,
            reads=_reads,
            writes=_writes,
        )
    )
