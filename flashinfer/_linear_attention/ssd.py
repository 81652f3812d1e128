"""The chunked kernels of Mamba-2, called with packed tensors and their workspace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .._common import checks
from ..jit.mamba import SsdConfig, gen_ssd_module
from .chunk_delta_rule import CHUNK_SIZE


@functools.cache
def get_ssd_kernel(config: SsdConfig) -> Callable[..., None]:
    """The kernel of a configuration, built at the first call."""
    return gen_ssd_module(config).build_and_load().ssd


@dataclass(frozen=True)
class Steps:
    """How far each token goes: dt and what makes the step of it."""

    dt: torch.Tensor
    bias: torch.Tensor | None
    softplus: bool
    limits: tuple[float, float]


def run_ssd(
    out: torch.Tensor,
    x: torch.Tensor,
    steps: Steps,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
) -> None:
    """Run the recurrence over packed sequences; `out` and `final` are written."""
    checks.cuda_tensors(x=x, B=B, C=C)
    slots, heads = x.shape[1] // CHUNK_SIZE + cu_seqlens.shape[0] - 1, x.shape[2]
    size = (slots, heads, CHUNK_SIZE * CHUNK_SIZE)
    scores = torch.empty(size, dtype=x.dtype, device=x.device)
    factors = torch.empty((slots, heads, 4 * CHUNK_SIZE), dtype=torch.float32, device=x.device)
    state = final if initial is None else initial
    state_dtype = torch.float32 if state is None else state.dtype
    get_ssd_kernel(SsdConfig(x.dtype, state_dtype, steps.dt.dtype, B.shape[-1]))(
        out,
        x,
        steps.dt,
        A,
        B,
        C,
        (D, z, steps.bias),
        (initial, final),
        cu_seqlens,
        (scores, factors),
        steps.limits,
        int(steps.softplus),
    )
