"""With `batch_invariant`, a request's tokens depend on the request alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from examples.serve.invariance import in_tiles, padded, round_up
from examples.serve.layers.linear import Linear
from examples.serve.model import Model
from tests.serve.mixes import alone, mixed, requests_of


@pytest.mark.parametrize("cuda_graph", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_tokens_in_random_mixes(model: Model, cuda_graph: bool, full: bool):
    preempted = 0
    for seed in range(60 if full else 2):
        rng = random.Random(seed)
        requests = requests_of(rng, 6)
        expected = alone(model, requests, use_cuda_graph=cuda_graph)
        tokens, count = mixed(model, requests, rng, use_cuda_graph=cuda_graph)
        assert tokens == expected
        preempted += count
    assert preempted > 0


def _depends_on_rows(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def changed(x: torch.Tensor, *others: Any) -> torch.Tensor:
        return function(x * _factor(len(x)), *others)

    return changed


def _factor(rows: int) -> float:
    """As if sums were added in another order for another number of rows, and more so."""
    return 1 + 0.03 * (rows % 7)


@pytest.mark.parametrize("what", ["product", "norm", "softmax", "attention"])
@pytest.mark.parametrize("invariant", [True, False], ids=["invariant", "usual"])
def test_operations_whose_rows_are_not_independent(
    model: Model, monkeypatch: pytest.MonkeyPatch, what: str, invariant: bool
):
    if what == "product":
        call = Linear.__call__
        monkeypatch.setattr(Linear, "__call__", lambda w, x: call(w, x) * _factor(len(x)))
    elif what == "attention":
        # The kernel for decoding adds in another order than that for prompts, and more so.
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        run = decode.run
        monkeypatch.setattr(decode, "run", lambda *args, **kwargs: run(*args, **kwargs) * 1.2)
    else:
        name = "rmsnorm" if what == "norm" else what
        monkeypatch.setattr(flashinfer, name, _depends_on_rows(getattr(flashinfer, name)))
    rng = random.Random(3)
    requests = requests_of(rng, 3)
    expected = alone(model, requests, batch_invariant=invariant)
    tokens, _ = mixed(model, requests, rng, batch_invariant=invariant)
    assert (tokens == expected) == invariant


def test_tiles():
    x, counted = torch.randn(7, 3), torch.zeros(8)
    sizes = []

    def function(rows: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(rows))
        counts += 1
        return 2 * rows, -rows

    double, negative = in_tiles(4, function, padded(x, round_up(len(x), 4)), counted)
    assert sizes == [4, 4] and bool((counted == 1).all())
    assert torch.equal(double[:7], 2 * x) and torch.equal(negative[:7], -x)
    assert not double[7:].any() and len(double) == 8
    assert in_tiles(None, len, x) == 7 and round_up(7, None) == 7
