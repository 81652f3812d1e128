"""Kernels over rows that leave statistics for each other in a workspace."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..jit import JitSpec
from .kernels import Kernel, KernelTable


class RowKernel:
    """A loaded kernel, and room for what it leaves, whose size its binding knows."""

    __slots__ = ("_workspace_bytes", "run")

    def __init__(self, run: Kernel, workspace_bytes: Callable[..., int]) -> None:
        self.run = run
        self._workspace_bytes = workspace_bytes

    def workspace(self, device: torch.device, *sizes: int) -> torch.Tensor | None:
        """Room for a call of these `sizes` (of ``workspace_bytes``); None where it needs none."""
        nbytes = self._workspace_bytes(*sizes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device) if nbytes else None


class RowKernels(KernelTable[RowKernel]):
    """Kernels of one op by dtype, as in `KernelTable`.

    Parameters
    ----------
    gen_module : callable
        Dtype to module. Raises ``ValueError`` for dtypes that there is no kernel for.
    export : str
        The op's name in the module.
    """

    def __init__(self, gen_module: Callable[[torch.dtype], JitSpec], export: str) -> None:
        def get_kernel(dtype: torch.dtype) -> RowKernel:
            module = gen_module(dtype).build_and_load()
            return RowKernel(getattr(module, export), module.workspace_bytes)

        super().__init__(get_kernel)
