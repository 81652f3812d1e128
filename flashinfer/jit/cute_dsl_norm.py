"""Modules of flashinfer/cute_dsl/norm_kernel.py: the norms of csrc/norm.cu, written in CuTe-DSL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import FLOAT, FLOAT8, check_dtype
from . import cute_dsl
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

_VECTOR_BYTES = 16
_VECTORS_OF_CTA = 2048
_CLUSTERS = (1, 2, 4, 8)


@dataclass(frozen=True)
class CuteDslNormConfig(ModuleConfig):
    """Selects code: here the length of a row, too. Rows, strides, weight offset are arguments."""

    module: ClassVar[str] = "cute_dsl_norm"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (9,)

    dtype: torch.dtype
    out_dtype: torch.dtype
    hidden: int
    subtract_mean: bool = False
    add_residual: bool = False

    def __post_init__(self) -> None:
        check_dtype("input", self.dtype, FLOAT)
        check_dtype("out", self.out_dtype, (self.dtype, *FLOAT8))
        vectors, rest = divmod(self.hidden * self.dtype.itemsize, _VECTOR_BYTES)
        # Rows of more than one CTA are cut into equal parts.
        parts = next((n for n in _CLUSTERS if vectors <= n * _VECTORS_OF_CTA), 0)
        if rest or vectors < 1 or not parts or vectors % parts:
            unit = (parts or _CLUSTERS[-1]) * _VECTOR_BYTES // self.dtype.itemsize
            most = _CLUSTERS[-1] * _VECTORS_OF_CTA * _VECTOR_BYTES // self.dtype.itemsize
            raise ValueError(
                f"`input` must have {unit} to {most} columns, a multiple of {unit}, for kernels in "
                f"CuTe-DSL, got {self.hidden}"
            )


def _aot_configs() -> Iterator[CuteDslNormConfig]:
    """Rows of common models, and heads of 128."""
    for hidden in (128, 2048, 4096, 7168, 8192):
        for out_dtype in (torch.bfloat16, torch.float8_e4m3fn):
            for add_residual in (False, True):
                yield CuteDslNormConfig(
                    torch.bfloat16, out_dtype, hidden, add_residual=add_residual
                )
        yield CuteDslNormConfig(torch.bfloat16, torch.bfloat16, hidden, subtract_mean=True)


@register_generator(aot=_aot_configs, presets={"cute-dsl": _aot_configs}, compiler="cute-dsl")
def gen_cute_dsl_norm_module(config: CuteDslNormConfig) -> JitSpec:
    """The module with ``norm`` and, for an RMS norm, ``gemma_norm``, of one row length."""
    kernel = cute_dsl.KERNELS / "norm_kernel.py"
    return JitSpec.from_config(config, ["norm_jit_binding.cc", "cute_dsl_norm.cc", kernel])
