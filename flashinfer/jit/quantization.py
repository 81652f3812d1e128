"""Modules of csrc/group_quant.cu and csrc/packbits.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

CODES = ("int8", "e4m3", "e5m2", "e2m1")
LAYOUTS = ("linear", "column_major", "swizzled_128x4", "swizzled_8x4")
SCALES = ("float32", "power_of_two_float32", "ue8m0", "e4m3")
MAX_GROUP_SIZE = 1 << 20


@dataclass(frozen=True)
class GroupQuantConfig(ModuleConfig):
    """Selects code: input dtype, formats of codes and scales, the scales' layout, group size,
    gate before."""

    module: ClassVar[str] = "group_quant"

    dtype: torch.dtype
    code: str
    scale: str
    layout: str
    group_size: int
    silu_and_mul: bool = False

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype, FLOAT)
        for name, value, allowed in (
            ("code", self.code, CODES),
            ("scale", self.scale, SCALES),
            ("layout", self.layout, LAYOUTS),
        ):
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {value!r}")
        if not 1 <= self.group_size <= MAX_GROUP_SIZE:
            raise ValueError(
                f"`group_size` must be between 1 and {MAX_GROUP_SIZE}, got {self.group_size}"
            )


@dataclass(frozen=True)
class KVFloat4Config(ModuleConfig):
    """Selects code: the type of 16 bits that 4-bit caches (NVFP4) are made from and read as."""

    module: ClassVar[str] = "kv_float4"

    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_dtype("append_key", self.dtype, (torch.float16, torch.bfloat16))


@dataclass(frozen=True)
class PackBitsConfig(ModuleConfig):
    """Selects code: the type of the segments' offsets, ``none`` without segments."""

    module: ClassVar[str] = "packbits"

    index: str

    def __post_init__(self) -> None:
        if self.index not in ("none", "int32", "int64"):
            raise ValueError(f"`index` must be none, int32 or int64, got {self.index!r}")


def _fp8_cases(dtype: torch.dtype = torch.bfloat16) -> Iterator[GroupQuantConfig]:
    for layout in ("linear", "column_major"):
        for silu_and_mul in (False, True):
            yield GroupQuantConfig(dtype, "e4m3", "float32", layout, 128, silu_and_mul)
    yield GroupQuantConfig(dtype, "e4m3", "power_of_two_float32", "column_major", 128)
    for layout in ("linear", "swizzled_128x4"):
        yield GroupQuantConfig(dtype, "e4m3", "ue8m0", layout, 32)


def _fp4_cases(dtype: torch.dtype = torch.bfloat16) -> Iterator[GroupQuantConfig]:
    for layout in ("linear", "swizzled_128x4"):
        yield GroupQuantConfig(dtype, "e2m1", "ue8m0", layout, 32)
        for silu_and_mul in (False, True):
            yield GroupQuantConfig(dtype, "e2m1", "e4m3", layout, 16, silu_and_mul)


def _group_quant_cases() -> Iterator[GroupQuantConfig]:
    for dtype in (torch.float16, torch.bfloat16):
        yield from _fp8_cases(dtype)
        yield from _fp4_cases(dtype)
        yield GroupQuantConfig(dtype, "int8", "float32", "linear", 128)


def _deepseek_cases() -> Iterator[GroupQuantConfig]:
    yield GroupQuantConfig(torch.bfloat16, "e4m3", "float32", "linear", 128)


@register_generator(
    aot=_group_quant_cases,
    presets={"fp8": _fp8_cases, "fp4": _fp4_cases, "deepseek": _deepseek_cases},
)
def gen_group_quant_module(config: GroupQuantConfig) -> JitSpec:
    """The module with ``group_quant`` for one configuration."""
    sources = ["group_quant.cu", "group_quant_jit_binding.cc"]
    return JitSpec.from_config(config, sources)


def _packbits_cases() -> Iterator[PackBitsConfig]:
    yield PackBitsConfig("none")
    yield PackBitsConfig("int32")


@register_generator(aot=_packbits_cases, presets={"speculative": _packbits_cases})
def gen_packbits_module(config: PackBitsConfig | None = None) -> JitSpec:
    """The module with ``packbits``, for segments of an array or, by default, for a whole one."""
    sources = ["packbits.cu", "packbits_jit_binding.cc"]
    return JitSpec.from_config(config or PackBitsConfig("none"), sources)


def _kv_float4_cases() -> Iterator[KVFloat4Config]:
    yield KVFloat4Config(torch.float16)
    yield KVFloat4Config(torch.bfloat16)


def _kv_float4_bf16() -> Iterator[KVFloat4Config]:
    yield KVFloat4Config(torch.bfloat16)


@register_generator(aot=_kv_float4_cases, presets={"fp4": _kv_float4_bf16})
def gen_kv_float4_module(config: KVFloat4Config) -> JitSpec:
    """The module that appends to 4-bit caches and reads them back."""
    return JitSpec.from_config(config, ["kv_float4.cu", "kv_float4_jit_binding.cc"])


def gen_fp4_kv_quantization_module() -> JitSpec:
    """The module of ``nvfp4_kv_quantize`` for bfloat16."""
    return gen_group_quant_module(GroupQuantConfig(torch.bfloat16, "e2m1", "e4m3", "linear", 16))


def gen_fp4_kv_dequantization_module() -> JitSpec:
    """The module of ``nvfp4_kv_dequantize`` for bfloat16."""
    return gen_kv_float4_module(KVFloat4Config(torch.bfloat16))
