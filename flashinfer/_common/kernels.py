"""Loaded kernels by the dtypes of a call: what stands between a public function and its module.

A public function of a small op costs the host more in Python than in the launch, so its usual path
is one look-up and one call; the binding checks the arguments. Everything else happens when that
fails::

    try:
        _rmsnorm[input.dtype](out, input, weight, eps, enable_pdl)
    except UNUSUAL as error:
        kernel = _rmsnorm.load(error, input=input)
        kernel(out, input, weight, eps, enable_pdl)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Kernel = Callable[..., None]
Loaded = TypeVar("Loaded")

UNUSUAL = (KeyError, AttributeError, RuntimeError)
"""Kernel not loaded yet; an argument that is no tensor; a tensor that DLPack cannot describe."""


class KernelTable(dict[Any, Loaded], Generic[Loaded]):
    """Kernels of one op, keyed by the dtype (several: the tuple of dtypes) of what `load` is given.

    Parameters
    ----------
    get_kernel : callable
        Dtypes to kernel: builds and loads the module. Raises ``ValueError`` for dtypes that there
        is no kernel for.
    """

    def __init__(self, get_kernel: Callable[..., Loaded]) -> None:
        super().__init__()
        self._get_kernel = get_kernel

    def load(self, error: Exception, **tensors: Any) -> Loaded:
        """Kernel for a call that ended with `error`.

        Raises
        ------
        TypeError, ValueError
            If an argument is not a tensor or not on a GPU.
        RuntimeError
            `error` itself, if the arguments are not to blame.
        """
        check_cuda_tensors(**tensors)
        if not isinstance(error, KeyError):
            raise error
        dtypes = tuple(tensor.dtype for tensor in tensors.values())
        kernel = self._get_kernel(*dtypes)
        self[dtypes if len(dtypes) > 1 else dtypes[0]] = kernel
        return kernel


def check_cuda_tensors(**tensors: Any) -> None:
    """Refuse what is not a dense CUDA tensor; see `KernelTable.load`."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}"
            ) from None
        if tensor.layout is not torch.strided:
            raise ValueError(f"`{name}` must be a dense tensor, got {tensor.layout}") from None
        if not tensor.is_cuda:
            hint = (
                "" if torch.cuda.is_available() else "; without a GPU: FLASHINFER_BACKEND=reference"
            )
            raise ValueError(
                f"`{name}` must be a CUDA tensor, got one on {tensor.device}{hint}"
            ) from None
