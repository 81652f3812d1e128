"""Loaded kernels by configuration: what stands between a public function and its module.

A public function of a small op costs the host more in Python than in the launch, so its usual path
is one look-up and one call, and the binding checks the arguments::

    try:
        kernel = _rmsnorm[input.dtype]
    except NOT_LOADED:
        kernel = _rmsnorm.load(input=input)
    kernel(out, input, weight, eps, enable_pdl)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from . import checks

Kernel = Callable[..., None]
Loaded = TypeVar("Loaded")

NOT_LOADED = (KeyError, AttributeError)
"""What a look-up raises if the configuration is new, or an argument has no dtype."""


class KernelTable(dict[Any, Loaded], Generic[Loaded]):
    """Kernels of one op by configuration: a dtype, or a tuple of dtypes and other hashable values.

    Parameters
    ----------
    get_kernel : callable
        Builds and loads the kernel of a configuration, whose parts are its arguments. Raises
        ``ValueError`` for a configuration that has no kernel.
    """

    def __init__(self, get_kernel: Callable[..., Loaded]) -> None:
        super().__init__()
        self._get_kernel = get_kernel

    def load(self, *options: Any, **tensors: Any) -> Loaded:
        """Load the kernel of a configuration and remember it.

        Parameters
        ----------
        *options
            The parts of the configuration that are not dtypes of tensors; they come last in it.
        **tensors
            The arguments whose dtypes come first in the configuration, by name.

        Raises
        ------
        TypeError, ValueError
            If one of `tensors` is not a dense CUDA tensor, or there is no kernel for them.
        """
        try:
            checks.cuda_tensors(**tensors)
        except (TypeError, ValueError) as error:
            raise error from None  # the failed look-up says nothing to the caller
        parts = (*(tensor.dtype for tensor in tensors.values()), *options)
        kernel = self._get_kernel(*parts)
        self[parts if len(parts) > 1 else parts[0]] = kernel
        return kernel
