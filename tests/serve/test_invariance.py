"""With `batch_invariant`, a request's tokens depend on the request alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashinfer
from examples.serve.engine import Engine, SamplingParams
from examples.serve.invariance import in_tiles, padded, round_up
from examples.serve.layers.linear import Linear
from examples.serve.model import Model

Requests = dict[str, tuple[list[int], SamplingParams]]


def _requests(rng: random.Random, count: int) -> Requests:
    prefixes = [rng.choices(range(256), k=24) for _ in range(2)]
    requests = {}
    for number in range(count):
        prompt = rng.choice(prefixes)[: rng.randint(0, 24)]
        prompt = prompt + rng.choices(range(256), k=rng.randint(1, 20))
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.5]),
            top_k=rng.choice([0, 0, 40]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            min_p=rng.choice([0.0, 0.0, 0.02]),
            seed=rng.randrange(1 << 40),
            max_tokens=rng.randint(3, 9),
            ignore_eos=True,
        )
        requests[str(number)] = prompt, params
    return requests


def _engine(model: Model, **options: Any) -> Engine:
    usual = {"num_pages": 64, "page_size": 4, "batch_invariant": True}
    return Engine(model, None, **(usual | options))


def _alone(model: Model, requests: Requests, **options: Any) -> dict[str, list[int]]:
    tokens = {}
    for name, (prompt, params) in requests.items():
        engine = _engine(model, **options)
        engine.add_request(name, prompt, params)
        tokens[name] = [o.token_id for _ in range(1000) if engine.has_work for o in engine.step()]
    return tokens


def _mixed(
    model: Model, requests: Requests, rng: random.Random, **options: Any
) -> tuple[dict[str, list[int]], int]:
    """Tokens of requests that come at random, some for nothing, and how many lost their pages."""
    engine = _engine(model, max_batch_size=6, max_batch_tokens=24, num_pages=20, **options)
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    left = list(requests)
    rng.shuffle(left)
    preempted = number = 0
    while left or engine.has_work:
        if left and rng.random() < 0.6:
            name = left.pop()
            engine.add_request(name, *requests[name])
        if rng.random() < 0.2:
            number += 1
            prompt = rng.choices(range(256), k=rng.randint(1, 40))
            engine.add_request(f"guest {number}", prompt, SamplingParams(top_k=3, max_tokens=4))
        if number and rng.random() < 0.1:
            engine.cancel(f"guest {rng.randint(1, number)}")
        running = {request.id for request in engine._scheduler.running}
        for output in engine.step():
            if output.request_id in tokens:
                tokens[output.request_id].append(output.token_id)
        preempted += len(running & {request.id for request in engine._scheduler.waiting})
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"]
    return tokens, preempted


@pytest.mark.parametrize("cuda_graph", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_tokens_in_random_mixes(model: Model, cuda_graph: bool, full: bool):
    preempted = 0
    for seed in range(60 if full else 2):
        rng = random.Random(seed)
        requests = _requests(rng, 6)
        expected = _alone(model, requests, use_cuda_graph=cuda_graph)
        tokens, count = _mixed(model, requests, rng, use_cuda_graph=cuda_graph)
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
    requests = _requests(rng, 3)
    expected = _alone(model, requests, batch_invariant=invariant)
    tokens, _ = _mixed(model, requests, rng, batch_invariant=invariant)
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
