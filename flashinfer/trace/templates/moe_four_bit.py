"""4-bit weights of mixtures of experts in templates: axes, scales, values and examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..specs import Axis, Const, Tensor, Value
from .weight_only import _codes_of, _scales_of

FOUR_BIT = ("int4", "mxfp4", "nvfp4")
_SCALE_TYPES = {
    "int4": ("bfloat16", "float16", "float32"),
    "mxfp4": ("uint8", "float8_e8m0fnu"),
    "nvfp4": ("float8_e4m3fn",),
}
_GROUPS = {"mxfp4": 32, "nvfp4": 16}
_FACTORS = ("fc1_factor", "fc2_factor")


def format_of(scales: Any) -> str:
    """The format that a call's scales belong to."""
    dtype = getattr(scales[0], "dtype", None) if isinstance(scales, (list, tuple)) and scales else 0
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        return "mxfp4"
    return "nvfp4" if dtype == torch.float8_e4m3fn else "int4"


def with_bytes_of_scales(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with one byte for each scale of MXFP4 where a call has four in an int32."""
    result = {name: arguments.get(name) for name in arguments}
    scales = result.get("quant_scales")
    if isinstance(scales, (list, tuple)):
        result["quant_scales"] = [
            s.view(torch.uint8) if getattr(s, "dtype", None) == torch.int32 else s for s in scales
        ]
    return result


def values_of(weight: torch.Tensor, scales: list[torch.Tensor], index: int) -> torch.Tensor:
    """The values of the first or second weights, ``[experts, rows, k]``, float64."""
    weight_format, k = format_of(scales), 2 * weight.shape[-1]
    scale = scales[index]
    values = _codes_of(weight, weight_format)
    values *= _scales_of(scale.flatten(0, 1), weight_format, k).view(values.shape)
    if weight_format == "nvfp4":
        values *= scales[2 + index].reshape(-1, 1, 1).double()
    return values


def four_bit_axes(weight_format: str) -> dict[str, Axis]:
    """Axes beside those of every mixture."""
    axes: dict[str, Axis] = {
        "hidden_bytes": Const("Bytes of a row of the first weights.", abbrev=""),
        "intermediate": Const(
            "Elements of a row between the products.",
            abbrev="i",
            derive=lambda sizes: 2 * sizes["bytes_between"],
        ),
        "bytes_between": Const("Bytes of a row of the second weights.", abbrev=""),
        "hidden_groups": Const("Groups of a token's elements.", abbrev=""),
        "groups": Const("Groups of a row between the products.", abbrev=""),
    }
    if weight_format == "nvfp4":
        for name in _FACTORS:
            axes[f"{name}s"] = Const("1, or a factor for each expert.", abbrev="")
    return axes


def four_bit_weights() -> dict[str, Value]:
    """Both weights."""
    return {
        name: Tensor(["experts", rows, columns], dtype="uint8", description="Two codes a byte.")
        for name, rows, columns in (
            ("fc1_expert_weights", "columns", "hidden_bytes"),
            ("fc2_expert_weights", "hidden", "bytes_between"),
        )
    }


def four_bit_scales(weight_format: str) -> dict[str, Value]:
    """The elements of `quant_scales`."""
    shapes = ("columns", "hidden_groups"), ("hidden", "groups")
    scales: dict[str, Value] = {
        f"fc{i + 1}_scale": Tensor(
            ["experts", rows, groups],
            param="quant_scales",
            tuple_idx=i,
            dtypes=_SCALE_TYPES[weight_format],
            description="Factors of groups along k.",
        )
        for i, (rows, groups) in enumerate(shapes)
    }
    if weight_format == "nvfp4":
        for i, name in enumerate(_FACTORS):
            scales[name] = Tensor(
                [f"{name}s"],
                param="quant_scales",
                tuple_idx=2 + i,
                dtype="float32",
                ranks=(0, 1),
                description="Factors of the experts' weights.",
            )
    return scales


def four_bit_constraints(weight_format: str) -> list[str]:
    """Equations that the axes satisfy."""
    constraints = ["hidden_bytes * 2 == hidden"]
    if weight_format in _GROUPS:
        group = _GROUPS[weight_format]
        constraints += [f"hidden_groups * {group} == hidden", f"groups * {group} == intermediate"]
    return constraints


def four_bit_example(
    weight_format: str,
    shapes: tuple[tuple[int, int, int], tuple[int, int, int]],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights with elements of ``[experts, rows, k]`` about ``1 / sqrt(k)``, and their scales."""
    weights, scales = [], []
    group = _GROUPS.get(weight_format, 128)
    for experts, rows, k in shapes:
        codes = torch.randint(0, 256, (experts, rows, k // 2), generator=generator)
        weights.append(codes.to(torch.uint8))
        scale = (torch.rand(experts, rows, k // group, generator=generator) + 0.5) / 4
        if weight_format == "mxfp4":
            scales.append((scale * 8 + 121).to(torch.uint8))
        elif weight_format == "nvfp4":
            scales.append(scale.to(torch.float8_e4m3fn))
        else:
            scales.append((scale / k**0.5).to(dtype))
    if weight_format == "nvfp4":
        scales += [
            (torch.rand(shape[0], generator=generator) + 0.5) / shape[2] ** 0.5 for shape in shapes
        ]
    return weights, scales
