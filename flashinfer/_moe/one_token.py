"""The experts of one token with weights of 16 bits: two launches of csrc/moe_token.cu."""

from __future__ import annotations

import functools

import torch

from .._common.arch import get_compute_capability
from .._common.kernels import Kernel
from ..gemm._tuning import HOPPER
from ..jit.moe import MoeTokenConfig, gen_moe_token_module

_MOST_CHOICES = 32
_MOST_BYTES = 40 << 10  # of shared memory, so that four thread blocks fit an SM
_STEP = 256  # elements that a warp reads at once


@functools.cache
def _kernel(dtype: torch.dtype, ids: torch.dtype) -> Kernel:
    index = "int64" if ids == torch.int64 else "int32"
    return gen_moe_token_module(MoeTokenConfig(dtype, index)).build_and_load().moe_token


def takes(
    x: torch.Tensor, out: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor, top_k: int
) -> bool:
    """Whether the kernels compute `top_k` experts of `x`, gated by SiLU, on its device."""
    if len(x) != 1 or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    _, hidden, inner = fc2.shape
    steps = -(-top_k * -(-inner // _STEP) // 12) * 12
    return (
        x.dtype == out.dtype == fc1.dtype == fc2.dtype
        and top_k <= _MOST_CHOICES
        and hidden % 8 == inner % 8 == 0
        and max(2 * hidden + 4096, steps * (2 * _STEP + 16)) <= _MOST_BYTES
        and get_compute_capability(x.device) == HOPPER
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, out, fc1, fc2))
    )


def multiply(
    out: torch.Tensor,
    hidden: torch.Tensor,
    x: torch.Tensor,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    first_expert: int = 0,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' results, SwiGLU with the values' rows first.

    Parameters
    ----------
    out, x : torch.Tensor
        ``[1, hidden]``.
    hidden : torch.Tensor
        ``[top_k, intermediate]``: memory between the products.
    fc1, fc2 : torch.Tensor
        ``[experts, 2 * intermediate, hidden]`` and ``[experts, hidden, intermediate]``.
    chosen, weights : torch.Tensor
        ``[1, top_k]``: experts, int32 or int64, and their weights, float32.
    first_expert : int
        The number of the first expert that is here.
    enable_pdl : bool, optional
        Programmatic dependent launch; None takes it where the device has it.
    """
    kernel = _kernel(x.dtype, chosen.dtype)
    kernel(out, hidden, x, fc1, fc2, chosen, weights, first_expert, enable_pdl)
    return out
