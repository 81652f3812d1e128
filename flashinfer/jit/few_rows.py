"""Modules of csrc/few_rows.cu: products of few rows with weights ``[k, n]``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

ROWS, COLUMNS = (1, 2, 4, 8), (64, 128)


@dataclass(frozen=True)
class FewRowsConfig(ModuleConfig):
    """Selects code: the type, how many rows at most, and the columns of a CTA."""

    module: ClassVar[str] = "few_rows"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (9,)

    dtype: torch.dtype
    rows: int
    columns: int

    def __post_init__(self) -> None:
        check_dtype("a", self.dtype, (torch.float16, torch.bfloat16))
        if self.rows not in ROWS or self.columns not in COLUMNS:
            raise ValueError(
                f"`rows` and `columns` must be one of {ROWS} and {COLUMNS}, got {self.rows} and "
                f"{self.columns}"
            )


def _configs() -> Iterator[FewRowsConfig]:
    for rows in ROWS:
        for columns in COLUMNS:
            yield FewRowsConfig(torch.bfloat16, rows, columns)


@register_generator(aot=_configs, presets={"llama-bf16": _configs})
def gen_few_rows_module(config: FewRowsConfig) -> JitSpec:
    """The module with ``few_rows``."""
    return JitSpec.from_config(config, ["few_rows.cu", "few_rows_jit_binding.cc"])
