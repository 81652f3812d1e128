"""Public API of the scale op."""

from __future__ import annotations

import functools

import torch

from flashinfer.api_logging import flashinfer_api
from flashinfer.utils import backend_requirement, supported_compute_capability

from .jit import gen_scale_module


@functools.cache
def get_scale_module(dtype_in: str, dtype_out: str):
    """The loaded module, compiled on the first call for these dtypes."""
    return gen_scale_module(dtype_in, dtype_out).build_and_load()


@supported_compute_capability([75, 80, 86, 89, 90, 100, 103, 110, 120, 121])
def _check_scale_problem_size(
    input: torch.Tensor, factor: float, out: torch.Tensor | None = None
) -> bool:
    if not input.is_cuda:
        raise ValueError(f"input must be a CUDA tensor, got one on {input.device}")
    if out is not None:
        if out.shape != input.shape:
            raise ValueError(f"out must have shape {tuple(input.shape)}, got {tuple(out.shape)}")
        if out.dtype != input.dtype:
            raise ValueError(f"out must have dtype {input.dtype}, got {out.dtype}")
        if out.device != input.device:
            raise ValueError(f"out must be on {input.device}, got {out.device}")
    return True


@flashinfer_api
@backend_requirement(backend_checks={}, common_check=_check_scale_problem_size)
def scale(input: torch.Tensor, factor: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply each element by a factor.

    Parameters
    ----------
    input : torch.Tensor
        Contiguous CUDA tensor of any shape, float32, float16 or bfloat16.
    factor : float
        Rounded to the dtype of `input` before it is used.
    out : torch.Tensor, optional
        Where the result goes; may be `input` itself.

    Returns
    -------
    torch.Tensor
        ``input * factor``, in `out` if it was given.

    Raises
    ------
    ValueError, TypeError
        If `input` or `out` is not as described.
    """
    if out is None:
        out = torch.empty_like(input)
    dtype = str(input.dtype).removeprefix("torch.")
    module = get_scale_module(dtype, dtype)
    module.run(input, out, float(factor))
    return out
