"""Modules of csrc/gemm_sm90.cu: matrix products on Hopper, dense, batched and grouped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT8, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

TARGET_FLAGS = ("-gencode=arch=compute_90a,code=sm_90a",)
"""wgmma exists for this target alone, whatever list of targets there is."""

SCALES = ("none", "token_channel", "block", "group")
GATED = ("swiglu", "swiglu_gate_last", "geglu_gate_last")
ACTIVATIONS = ("identity", "relu2", *GATED)
_RESULTS = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)
GROUPS = ("batch", "offsets", "lengths", "masked", "indices")


@dataclass(frozen=True)
class GemmConfig(ModuleConfig):
    """What selects code: types, scales, groups, and the tiles that the work is cut into.

    Attributes
    ----------
    tile_rows, tile_columns : int
        Rows and columns of the result that a CTA computes at a time.
    consumers : int
        Warpgroups that multiply.
    swap : bool
        Columns of the result are the tensor cores' rows, for few tokens.
    cluster_rows, cluster_columns : int
        CTAs that share their columns' (rows') operand by multicast.
    splits : int
        CTAs that sum a part of k each.
    activation : str
        The step after the product, as gemm_params.h says; those in `GATED` halve the columns.
    gathers : bool
        Rows of a come through an index map.
    max_stages : int
        Upper bound of the stages that are loaded ahead; shared memory is the other one.
    """

    module: ClassVar[str] = "gemm"
    supported_major_versions: ClassVar[tuple[int, ...]] = (9,)

    dtype_a: torch.dtype
    dtype_b: torch.dtype
    dtype_out: torch.dtype
    tile_rows: int
    tile_columns: int
    scale: str = "none"
    groups: str = "batch"
    consumers: int = 2
    swap: bool = False
    cluster_rows: int = 1
    cluster_columns: int = 1
    splits: int = 1
    activation: str = "identity"
    gathers: bool = False
    max_stages: int = 12

    def __post_init__(self) -> None:
        operands = (torch.float16, torch.bfloat16, *FLOAT8)
        check_dtype("a", self.dtype_a, operands)
        same = FLOAT8 if self.dtype_a in FLOAT8 else (self.dtype_a,)
        check_dtype("b", self.dtype_b, same)
        check_dtype("out", self.dtype_out, _RESULTS)
        if self.dtype_out == torch.float8_e4m3fn and self.dtype_a not in FLOAT8:
            raise ValueError(f"`out` may be {self.dtype_out} for operands of 8 bits alone")
        for name, value, allowed in (
            ("scale", self.scale, SCALES),
            ("groups", self.groups, GROUPS),
            ("activation", self.activation, ACTIVATIONS),
        ):
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {value!r}")


def _aot_configs() -> Iterator[GemmConfig]:
    bf16 = torch.bfloat16
    yield GemmConfig(bf16, bf16, bf16, 128, 256, cluster_rows=2)


def _mixture_configs(code: torch.dtype, scale: str) -> Iterator[GemmConfig]:
    """Both products of a mixture with SwiGLU, for every batch: `code` is the operands' dtype."""
    first = GemmConfig(
        code,
        code,
        code,
        128,
        256,
        scale=scale,
        groups="offsets",
        activation="swiglu_gate_last",
        gathers=True,
    )
    second = GemmConfig(code, code, torch.bfloat16, 128, 256, scale=scale, groups="offsets")
    yield from (first, second)
    for rows in (8, 16, 32, 64, 128):
        yield replace(first, tile_rows=rows, swap=True)
        shared = 1 if rows == 8 else 2
        yield replace(second, tile_rows=rows, tile_columns=128, cluster_columns=shared, swap=True)


def _qwen3_moe_configs() -> Iterator[GemmConfig]:
    for config in _mixture_configs(torch.bfloat16, "none"):
        yield config
        if config.swap and config.gathers and config.tile_rows == 8:
            yield replace(config, tile_columns=128, consumers=1)
        if not config.swap and not config.gathers:
            yield replace(config, cluster_rows=2)


def _deepseek_configs() -> Iterator[GemmConfig]:
    for config in _mixture_configs(torch.float8_e4m3fn, "block"):
        yield config
        if config.swap and config.gathers and config.tile_rows == 8:
            yield replace(config, splits=2)


def _few_rows_configs() -> Iterator[GemmConfig]:
    """Products of up to 64 rows, whose weights are the tensor cores' rows."""
    base = replace(next(_aot_configs()), cluster_rows=1)
    yield from _swapped(base, (8, 16, 32, 64), ((64, 1), (128, 2)))


def _swapped(
    base: GemmConfig, sizes: Sequence[int], tiles: Sequence[tuple[int, int]]
) -> Iterator[GemmConfig]:
    """Tiles of few rows: their sizes, their columns and the warpgroups that these take."""
    for rows, (columns, consumers) in product(sizes, tiles):
        tile = replace(base, tile_rows=rows, tile_columns=columns, consumers=consumers, swap=True)
        for shared, splits in product((1,) if rows == 8 else (1, 2), (1, 2)):
            yield replace(tile, cluster_columns=shared, splits=splits)


def _fp8_configs() -> Iterator[GemmConfig]:
    """Products of 8 bits with block scales into bfloat16, and into codes of their SwiGLU."""
    code = torch.float8_e4m3fn
    base = GemmConfig(code, code, torch.bfloat16, 128, 128, scale="block")
    yield from _swapped(base, (8, 16, 32), ((64, 1), (128, 2)))
    for rows, consumers in ((64, 1), (128, 2)):
        few = replace(base, tile_rows=rows, tile_columns=64, consumers=consumers)
        yield from (few, replace(few, splits=2), replace(few, cluster_columns=2))
    yield from (replace(base, tile_rows=64, consumers=2, splits=splits) for splits in (3, 2))
    yield from (base, replace(base, splits=2), replace(base, cluster_rows=2))
    wide = replace(base, tile_columns=256)
    yield from (wide, replace(wide, cluster_rows=2))
    yield from (replace(wide, max_stages=3), replace(base, tile_rows=256, max_stages=3))

    gated = replace(wide, dtype_out=code, activation="swiglu_gate_last")
    yield from _swapped(gated, (8, 16, 32), ((256, 2),))
    few = replace(gated, tile_rows=64)
    yield from (few, replace(few, cluster_columns=2))
    yield from (replace(gated, swap=True), replace(gated, swap=True, cluster_columns=2))
    yield from (gated, replace(gated, cluster_rows=2))


def _all_configs() -> Iterator[GemmConfig]:
    mixtures = (_qwen3_moe_configs, _deepseek_configs)
    configs = (_aot_configs, _few_rows_configs, _fp8_configs, *mixtures)
    yield from dict.fromkeys(config for each in configs for config in each())


@register_generator(
    aot=_all_configs,
    presets={
        "gemm": _aot_configs,
        "llama-bf16": _few_rows_configs,
        "fp8": _fp8_configs,
        "qwen3-moe": _qwen3_moe_configs,
        "deepseek": _deepseek_configs,
    },
)
def gen_gemm_sm90_module(config: GemmConfig | None = None) -> JitSpec:
    """The module with ``gemm`` for one configuration; by default of large bfloat16 matrices."""
    config = config or next(_aot_configs())
    sources = ["gemm_sm90.cu", "gemm_jit_binding.cc"]
    return JitSpec.from_config(config, sources, extra_cuda_cflags=list(TARGET_FLAGS))


def gen_gemm_module() -> JitSpec:
    """FlashInfer's name for the products of older GPUs: the default of `gen_gemm_sm90_module`."""
    return gen_gemm_sm90_module()
