"""Requests that come, are cancelled and lose their pages at random."""

from __future__ import annotations

import random
from typing import Any

from examples.serve.engine import Engine, SamplingParams
from examples.serve.model import Model

Requests = dict[str, tuple[list[int], SamplingParams]]


def requests_of(rng: random.Random, count: int) -> Requests:
    """Some begin alike; drawn in every way."""
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


def engine_of(model: Model, **options: Any) -> Engine:
    """An invariant one, if options do not say otherwise."""
    usual = {"num_pages": 64, "page_size": 4, "batch_invariant": True}
    return Engine(model, None, **(usual | options))


def alone(model: Model, requests: Requests, **options: Any) -> dict[str, list[int]]:
    """Tokens of requests, each served by an engine of its own."""
    tokens = {}
    for name, (prompt, params) in requests.items():
        engine = engine_of(model, **options)
        engine.add_request(name, prompt, params)
        tokens[name] = [o.token_id for _ in range(1000) if engine.has_work for o in engine.step()]
    return tokens


def mixed(
    model: Model, requests: Requests, rng: random.Random, guests: float = 0.2, **options: Any
) -> tuple[dict[str, list[int]], int]:
    """Tokens of requests that come at random, some for nothing, and how many lost their pages.

    `guests`: how many others come in a step; some are cancelled.
    """
    usual = {"max_batch_size": 6, "max_batch_tokens": 24, "num_pages": 20}
    engine = engine_of(model, **(usual | options))
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    left = list(requests)
    rng.shuffle(left)
    preempted = number = 0
    while left or engine.has_work:
        if left and rng.random() < 0.6:
            name = left.pop()
            engine.add_request(name, *requests[name])
        if rng.random() < guests:
            number += 1
            prompt = rng.choices(range(256), k=rng.randint(1, 40))
            params = SamplingParams(top_k=3, max_tokens=4, seed=number)
            engine.add_request(f"guest {number}", prompt, params)
        if number and rng.random() < 0.1:
            engine.cancel(f"guest {rng.randint(1, number)}")
        running = {request.id for request in engine._scheduler.running}
        for output in engine.step():
            if output.request_id in tokens:
                tokens[output.request_id].append(output.token_id)
        preempted += len(running & {request.id for request in engine._scheduler.waiting})
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"]
    return tokens, preempted
