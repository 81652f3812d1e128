"""Tables of kernels by dtype, and their workspaces."""

from __future__ import annotations

from typing import Any, cast

import torch

from .._common.kernels import Kernel, KernelTable
from ..jit.sampling import Filter, Output, SamplingConfig, gen_sampling_module


class TokenKernels(KernelTable):
    """Kernels that draw one token per row."""

    def __init__(self, filter: Filter, logits: bool) -> None:
        def get_kernel(dtype: torch.dtype) -> Kernel:
            config = SamplingConfig(dtype, torch.float32, logits, filter, Output.TOKEN)
            return cast(Kernel, gen_sampling_module(config).build_and_load().sampling)

        super().__init__(get_kernel)
        self.name = "logits" if logits else "probs"
        self.filter = filter
        # Most draw in passes, of which the first leaves statistics in a workspace.
        self.leaves_statistics = filter is not Filter.MIN_P and not (
            logits and filter is Filter.TOP_P
        )


def row_kernels(filter: Filter, output: Output, logits: bool) -> KernelTable:
    def get_kernel(dtype: torch.dtype) -> Kernel:
        out_dtype = torch.float32 if filter is Filter.NONE else dtype
        config = SamplingConfig(dtype, out_dtype, logits, filter, output)
        return cast(Kernel, gen_sampling_module(config).build_and_load().sampling)

    return KernelTable(get_kernel)


def get_sampling_module() -> Any:
    """The module of `sampling_from_probs` for float32, compiled if need be."""
    config = SamplingConfig(torch.float32, torch.float32, False, Filter.NONE, Output.TOKEN)
    return gen_sampling_module(config).build_and_load()


def workspace_bytes(filter: Filter, rows: torch.Tensor, num_outputs: int) -> int:
    """What `workspace_bytes` in sampling_params.h asks for."""
    if rows.dim() != 2:
        return 0  # the binding refuses it
    num_tiles = -(-rows.shape[1] // 4096)
    if filter is Filter.TOP_P:
        num_pending = num_outputs if 8 <= num_outputs <= 1024 else 0
        return 16 + 516 * num_tiles * rows.shape[0] + (32 + 4 * 8192) * num_pending
    return (16 if filter is Filter.NONE else 144) * num_tiles * rows.shape[0]
