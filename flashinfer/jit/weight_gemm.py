"""Modules of csrc/weight_gemm*.cu: products with weights of 4, 8 and 16 bits, for few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .._common.dtypes import HALF, check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .gemm import ACTIVATIONS, GATED
from .registry import register_generator

FORMATS = ("plain", "int8", "int4", "mxfp4", "nvfp4")
"""Weights of the activations' type, and those that are unpacked on the way."""


@dataclass(frozen=True)
class WeightGemmConfig(ModuleConfig):
    """The fields that select code.

    Attributes
    ----------
    weights : str
        One of `FORMATS`.
    dtype_scale : torch.dtype
        Type of the weights' scales; uint8 for powers of two. Plain weights have none.
    group_size : int
        Elements of k that share a scale; 0: a whole row does.
    tokens : int
        Tokens that a CTA multiplies at a time: 8, 16, 32 or 64.
    warps : int
        Warps of a CTA that multiply; each has 16 rows of the weights, where these do not stream.
        A CTA that streams has 8 or, with `columns`, 16: two teams, a CTA on each SM.
    splits : int
        CTAs of a cluster that sum a part of k each; 1 before compute capability 9.0, and where
        CTAs that stream are persistent.
    activation : str
        The step after the product, as gemm_params.h says.
    streams : bool
        Hopper's copy engine brings weights of 4 bits for bfloat16, and 8 warps share 32 to 128 of
        their rows (gemm/sm90/weight_tile.cuh). Else threads copy the weights (gemm/portable/).
    columns : int
        Columns of the result that a CTA which streams computes and then ends, 32, 64 or 128; 0:
        CTAs are persistent, with tiles of 128, also for weights in groups and gated activations.
    """

    module: ClassVar[str] = "weight_gemm"
    supported_major_versions: ClassVar[tuple[int, ...]] = (8, 9, 10, 11, 12)

    dtype_a: torch.dtype
    dtype_out: torch.dtype
    weights: str
    dtype_scale: torch.dtype
    group_size: int
    tokens: int
    warps: int = 4
    splits: int = 1
    activation: str = "identity"
    streams: bool = False
    columns: int = 0

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype_a, HALF)
        check_dtype("out", self.dtype_out, (torch.float16, torch.bfloat16, torch.float32))
        for name, value, allowed in (
            ("weights", self.weights, FORMATS),
            ("activation", self.activation, ACTIVATIONS),
        ):
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {value!r}")
        if self.columns not in (0, 32, 64, 128):
            raise ValueError(f"`columns` must be 0, 32, 64 or 128, got {self.columns}")
        if self.columns and (not self.streams or self.activation in GATED):
            raise ValueError("`columns` must be 0 for gated activations and without `streams`")
        if self.streams and not self.columns and (self.warps, self.splits) != (8, 1):
            raise ValueError("`warps` must be 8 and `splits` 1 for persistent CTAs that stream")

    @property
    def majors(self) -> tuple[int, ...]:
        """Clusters exist from compute capability 9.0 on."""
        if self.streams:
            return (9,)
        versions = self.supported_major_versions
        return versions if self.splits == 1 else tuple(v for v in versions if v >= 9)


def _aot_configs() -> Iterator[WeightGemmConfig]:
    bf16 = torch.bfloat16
    for tokens in (8, 16):
        for splits in (1, 8):
            yield WeightGemmConfig(bf16, bf16, "int4", bf16, 128, tokens, 4, splits)
            yield WeightGemmConfig(bf16, bf16, "mxfp4", torch.uint8, 32, tokens, 4, splits)
        yield from _stream_configs(tokens)
        for columns, warps in ((32, tokens), (64, 8), (128, 8)):
            yield from _stream_configs(tokens, warps, columns)


def _stream_configs(
    tokens: int, warps: int = 8, columns: int = 0, activation: str = "identity"
) -> Iterator[WeightGemmConfig]:
    """A Hopper GPU takes these for 4-bit weights of the usual formats: one tile and activation."""
    bf16 = torch.bfloat16
    for weights, scale, group in (("int4", bf16, 128), ("mxfp4", torch.uint8, 32)):
        yield WeightGemmConfig(
            bf16, bf16, weights, scale, group, tokens, warps, 1, activation, True, columns
        )


def _mixture_configs() -> Iterator[WeightGemmConfig]:
    """First products of mixtures that stream; the second ones are dense ones' modules."""
    for tokens in (8, 16):
        yield from _stream_configs(tokens, activation="swiglu_gate_last")


def _gpt_oss_configs() -> Iterator[WeightGemmConfig]:
    bf16 = torch.bfloat16
    for tokens in (8, 16, 32, 64):
        for activation in ("swiglu_gate_last", "identity"):
            config = WeightGemmConfig(bf16, bf16, "mxfp4", torch.uint8, 32, tokens)
            yield replace(config, activation=activation)
            if tokens == 8 and activation == "identity":
                yield replace(config, splits=2)


def _all_configs() -> Iterator[WeightGemmConfig]:
    yield from dict.fromkeys([*_aot_configs(), *_mixture_configs(), *_gpt_oss_configs()])


@register_generator(aot=_all_configs, presets={"gemm": _aot_configs, "gpt-oss": _gpt_oss_configs})
def gen_weight_gemm_module(config: WeightGemmConfig | None = None) -> JitSpec:
    """The module with ``weight_gemm`` for one configuration; by default of 4-bit integers."""
    config = config or next(_aot_configs())
    launcher = "weight_gemm_sm90.cu" if config.streams else "weight_gemm.cu"
    return JitSpec.from_config(config, [launcher, "weight_gemm_jit_binding.cc"])
