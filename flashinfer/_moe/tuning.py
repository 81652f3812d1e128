"""Calls of a mixture for the tuner: batches of other sizes, with experts drawn at random.

The products of a call are tuned by their own launches (`gemm._tuning`). An engine warms up with its
largest batch, often of equal tokens that all choose the same experts, so within ``autotune()`` a
call first computes batches of every size up to its own with choices as they are in service.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from ..autotuner.autotuner import AutoTuner
from ..autotuner.listeners import call_on_change
from ..gemm._choice import GemmProblem
from ..gemm._tuning import compile_all, resized

_OPERATIONS = ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2")
_SIZES = tuple(1 << i for i in range(21))
_computed: set[Hashable] = set()
call_on_change(_computed.clear)

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""Of tokens, their choices, the choices' weights, and the result."""


def sizes_of_batches(tokens: int, most: int) -> tuple[int, ...]:
    """Powers of two up to the first that is not below `tokens`, and at most `most`."""
    enough = next((size for size in _SIZES if size >= tokens), tokens)
    return tuple(size for size in _SIZES if size <= min(enough, most))


def compute_batches(
    kind: Hashable,
    compute: Compute,
    products: Callable[[int], Iterable[GemmProblem]],
    x: torch.Tensor,
    chosen: torch.Tensor,
    out: torch.Tensor,
    experts: int,
    most: int,
) -> None:
    """Compute a batch of each size, so that its products are tuned, once for a kind of mixture.

    Parameters
    ----------
    kind : hashable
        Everything but the tokens that the products depend on.
    compute : callable
        The mixture without a check whether it is tuned.
    products : callable
        The products of a number of tokens.
    x, chosen, out : torch.Tensor
        Arguments of the call: tokens are repeated where it has too few.
    experts : int
        Experts everywhere, which choices are drawn from.
    most : int
        The most tokens of a batch, unless ``autotune(tuning_buckets=...)`` names sizes.
    """
    tuner = AutoTuner.get()
    if not any(map(tuner.measures, _OPERATIONS)) or out.numel() == 0:
        return
    sizes = tuner.given_buckets or sizes_of_batches(x.shape[0], most)
    if (kind, sizes) in _computed:
        return
    compile_all(product for tokens in sizes for product in products(tokens))
    draw = torch.Generator(x.device).manual_seed(0)
    top_k = chosen.shape[1]
    for tokens in sizes:
        scores = torch.rand(tokens, max(experts, top_k), generator=draw, device=x.device)
        drawn = (scores.topk(top_k).indices % experts).to(chosen.dtype)
        weights = torch.full((tokens, top_k), 1 / top_k, device=x.device)
        result = out.new_empty((tokens, out.shape[1]))
        compute(resized(x, 0, tokens), drawn, weights, result)
    _computed.add((kind, sizes))
