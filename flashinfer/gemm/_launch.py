"""Launches of the products' kernels: the module of a configuration, and its call."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._common import checks
from .._common.kernels import Kernel
from ..autotuner.listeners import call_on_change
from ..jit.gemm import GemmConfig, gen_gemm_sm90_module
from ._choice import GemmProblem
from ._tuning import choose_tiles, is_tuning, tiles_of

TRANSPOSED_B, SCALES_BY_K, SCALES_BY_BLOCK, STARTS_EARLY = 1, 2, 4, 8
"""Bits of the binding's `layout`: b is [.., k, n]; scales are [.., k / 128, rows]; 128 rows share
a scale; the previous kernel writes only a and its scales and, in groups, the one before it has
finished."""

NAMES = {
    "a": 0,
    "A": 1,
    "input": 2,
    "m_indices": 3,
    "masked_m": 4,
    "x": 5,
    "fc1": 6,
    "fc2": 7,
    "a_weight": 8,
}
"""What a public function calls its tensors, as the binding knows it."""

_kernels: dict[GemmProblem, Kernel] = {}  # empty while calls are tuned
_MOST_KERNELS = 4096
call_on_change(_kernels.clear)


@functools.cache
def get_gemm_kernel(config: GemmConfig) -> Kernel:
    """The loaded kernel, compiled first if need be."""
    return gen_gemm_sm90_module(config).build_and_load().gemm


def launch(
    problem: GemmProblem,
    names: str,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: tuple[torch.Tensor | None, ...] | None = None,
    *,
    bias: torch.Tensor | None = None,
    rows: tuple[Any, ...] | None = None,
    gate: tuple[Any, Any, Any] | None = None,
    layout: int = 0,
    max_ctas: int = 0,
    enable_pdl: bool | None = None,
    tactic: int = -1,
) -> torch.Tensor:
    """Compute the product into `out`, and give it back.

    Parameters
    ----------
    problem : GemmProblem
        The product that the tile is chosen for.
    names : str
        A key of `NAMES`.
    scales : tuple, optional
        Scales of a, of b and, for results of 8 bits, of `out`, which may be left out.
    bias, rows, gate, layout, max_ctas, enable_pdl
        As csrc/gemm_jit_binding.cc says.
    tactic : int
        Which one of `worth_measuring` is the tile; -1: the tuner's result, or the model's choice.
    """
    if scales is not None:
        scales = (*scales, *(None,) * (3 - len(scales)))
    if not a.is_cuda:  # the binding says so too, but only when it has been compiled
        checks.cuda_tensors(**{names if names in ("A", "input", "x") else "a": a})
    arguments = (
        NAMES[names], out, a, b, scales, bias, 1.0, rows, gate, layout, max_ctas, enable_pdl
    )  # fmt: skip
    kernel = _kernels.get(problem) if tactic == -1 else get_gemm_kernel(tiles_of(problem, tactic))
    if kernel is None:
        kernel = get_gemm_kernel(choose_tiles(problem, arguments, get_gemm_kernel))
        if len(_kernels) > _MOST_KERNELS:
            _kernels.clear()
        if not is_tuning():
            _kernels[problem] = kernel
    kernel(*arguments)
    return out
