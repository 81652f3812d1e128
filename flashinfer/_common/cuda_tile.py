"""Whether callers can compile kernels of cuTile; no kernel here is one."""

import contextlib
import importlib.util

import torch

from .arch import get_compute_capability

_OLDEST_MAJOR = 10
"""The first toolkit with tiles compiles them for Blackwell and later."""


def is_cuda_tile_available(device: torch.device | str | int | None = None) -> bool:
    """Whether kernels in cuTile, NVIDIA's language of tiles in Python, compile for a GPU.

    For callers that have such kernels: none of this package is one, and no result depends on it.

    Parameters
    ----------
    device : torch.device, str or int, optional
        The GPU; by default the current one.

    Returns
    -------
    bool
        Whether the package ``cuda.tile`` is installed and the GPU's compute capability is 10.0 or
        later; no on Hopper, and where there is no GPU.
    """
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec("cuda.tile") is not None and torch.cuda.is_available():
            current = "cuda" if device is None else device
            return get_compute_capability(current)[0] >= _OLDEST_MAJOR
    return False
