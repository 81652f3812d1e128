"""Tables of kernels by dtype."""

from __future__ import annotations

from typing import Any

import torch

from .._common.row_kernels import RowKernel, RowKernels
from ..jit import JitSpec
from ..jit.sampling import Filter, Output, SamplingConfig, gen_sampling_module


class SamplingKernels(RowKernels):
    """Kernels of one filter and output; `name` is what public functions call the rows."""

    def __init__(self, filter: Filter, output: Output, logits: bool) -> None:
        def gen_module(dtype: torch.dtype) -> JitSpec:
            is_float32 = output is Output.TOKEN or filter is Filter.NONE
            out_dtype = torch.float32 if is_float32 else dtype
            return gen_sampling_module(SamplingConfig(dtype, out_dtype, logits, filter, output))

        super().__init__(gen_module, "sampling")
        self.name = "logits" if logits else "probs"


def statistics_of(kernel: RowKernel, rows: torch.Tensor, num_outputs: int) -> torch.Tensor | None:
    """Room for the statistics that the first of several passes leaves, if there are several."""
    if rows.dim() != 2:
        return None  # the binding refuses it
    num_rows, vocab_size = rows.shape
    return kernel.workspace(rows.device, num_rows, num_outputs, vocab_size)


def get_sampling_module() -> Any:
    """The module of `sampling_from_probs` for float32, compiled if need be."""
    config = SamplingConfig(torch.float32, torch.float32, False, Filter.NONE, Output.TOKEN)
    return gen_sampling_module(config).build_and_load()
