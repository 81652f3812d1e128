"""Modules of csrc/few_rows.cu: products of few rows with weights ``[k, n]``."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

ROWS = 8
COLUMNS = (64, 128)


class FewRowsOutput(enum.Enum):
    """The use of the sums; the enumerators of ``FewRowsOutput`` in C++."""

    PRODUCT = "kProduct"
    GATED = "kGated"
    NORM = "kNorm"


@dataclass(frozen=True)
class FewRowsConfig(ModuleConfig):
    """Selects code: the type, the columns of a CTA, and what becomes of the sums."""

    module: ClassVar[str] = "few_rows"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (9,)

    dtype: torch.dtype
    columns: int
    output: FewRowsOutput = FewRowsOutput.PRODUCT

    def __post_init__(self) -> None:
        check_dtype("a", self.dtype, (torch.float16, torch.bfloat16))
        least = 128 if self.output is FewRowsOutput.GATED else 64
        if self.columns not in COLUMNS or self.columns < least:
            raise ValueError(
                f"`columns` must be one of {COLUMNS}, with a gate 128, got {self.columns}"
            )


def _configs() -> Iterator[FewRowsConfig]:
    for output in FewRowsOutput:
        for columns in COLUMNS:
            if output is not FewRowsOutput.GATED or columns == 128:
                yield FewRowsConfig(torch.bfloat16, columns, output)


@register_generator(aot=_configs, presets={"llama-bf16": _configs})
def gen_few_rows_module(config: FewRowsConfig) -> JitSpec:
    """The module with ``few_rows``."""
    return JitSpec.from_config(config, ["few_rows.cu", "few_rows_jit_binding.cc"])
