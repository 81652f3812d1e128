"""Modules of csrc/one_row.cu: products of one row with weights ``[k, n]``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from .._common.dtypes import check_dtype
from .config import ModuleConfig
from .core import JitSpec
from .registry import register_generator

COLUMNS = (64, 128)


@dataclass(frozen=True)
class OneRowConfig(ModuleConfig):
    """Selects code: the type, the columns of a CTA, and whether the row is a norm's."""

    module: ClassVar[str] = "one_row"
    supported_major_versions: ClassVar[tuple[int, ...] | None] = (9,)

    dtype: torch.dtype
    columns: int
    norm: bool = False

    def __post_init__(self) -> None:
        check_dtype("a", self.dtype, (torch.float16, torch.bfloat16))
        if self.columns not in COLUMNS:
            raise ValueError(f"`columns` must be one of {COLUMNS}, got {self.columns}")


def _configs() -> Iterator[OneRowConfig]:
    for columns in COLUMNS:
        for norm in (False, True):
            yield OneRowConfig(torch.bfloat16, columns, norm)


@register_generator(aot=_configs, presets={"llama-bf16": _configs})
def gen_one_row_module(config: OneRowConfig) -> JitSpec:
    """The module with ``one_row``."""
    return JitSpec.from_config(config, ["one_row.cu", "one_row_jit_binding.cc"])
