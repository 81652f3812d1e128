"""20,000 requests through the scheduler, with a model that costs nothing.

In the model's place, a hash of the tokens that a request's pages hold: what a request gets then
shows whether batching, preemption, sharing or a cancellation ever touched pages of another.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from examples.serve import checkpoint
from examples.serve.engine import Engine, SamplingParams
from examples.serve.scheduler import token_shares
from examples.serve.state import RequestState
from tests.serve.hash_model import HashModel, install, next_token

PAGES, PAGE_SIZE, BATCH, BATCH_TOKENS, WAITING = 90, 4, 16, 64, 40


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, HashModel]:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16}
    folder = checkpoint.write_random_checkpoint(tmp_path, {**checkpoint.SMALL, **shape})
    result = Engine(
        *checkpoint.load(folder, "cpu"),
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        max_batch_size=BATCH,
        max_batch_tokens=BATCH_TOKENS,
        max_waiting=WAITING,
    )
    return result, install(monkeypatch, result)


def test_20000_requests(served: tuple[Engine, HashModel]):
    """Every request is answered with its own tokens, cancelled, or refused with a reason."""
    engine, pages = served
    rng = random.Random(0)
    prefixes = [[rng.randrange(256) for _ in range(30)] for _ in range(5)]
    tokens: dict[str, list[int]] = {}  # of requests in the engine, prompts included
    wanted: dict[str, int] = {}
    reasons: dict[str, int] = {}
    finished_tokens = preemptions = 0

    def end(reason: str) -> None:
        reasons[reason] = reasons.get(reason, 0) + 1

    def receive() -> None:
        nonlocal preemptions, finished_tokens
        before = {request.id for request in engine._scheduler.running}
        for output in engine.step():
            name = output.request_id
            assert output.token_id == next_token(tokens[name])
            tokens[name].append(output.token_id)
            wanted[name] -= 1
            assert output.finished == (wanted[name] == 0)
            if output.finished:
                finished_tokens += len(tokens.pop(name))
                end(str(output.reason))
        preemptions += len(before & {request.id for request in engine._scheduler.waiting})
        used = {page for request in engine._scheduler.running for page in request.pages}
        assert engine.stats()["pages_free"] == PAGES - len(used)

    for number in range(20000):
        name, size = str(number), rng.randint(1, 40)
        prompt = rng.choice(prefixes)[: rng.randint(0, 30)] + rng.choices(range(256), k=size)
        # A few do not fit the cache at all.
        count = rng.randint(1, 20) if rng.random() > 0.01 else 10 * PAGES
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        try:
            engine.add_request(name, prompt, params)
        except ValueError as refusal:
            end(str(refusal).split(":")[0])
        else:
            tokens[name], wanted[name] = list(prompt), count
        if tokens and rng.random() < 0.1:
            victim = rng.choice(list(tokens))
            assert engine.cancel(victim)
            del tokens[victim]
            end("cancelled")
        # Sometimes faster than it can be served, sometimes slower.
        for _ in range(2 if number // 500 % 2 else rng.random() < 0.2):
            receive()
    while engine.has_work:
        receive()
    assert not tokens and sum(reasons.values()) == 20000
    assert set(reasons) == {"length", "cancelled", "too long", "over capacity"}
    assert min(reasons.values()) > 100 and preemptions > 30
    assert pages.ahead > 1000
    # Shared prefixes save more than preempted and cancelled requests cost.
    assert pages.computed < finished_tokens
    stats = engine.stats()
    assert stats["pages_free"] == PAGES and stats["running"] == stats["waiting"] == 0


def test_the_oldest_request_is_served_first(served: tuple[Engine, HashModel]):
    """Requests that together take three times the cache end in the order of their arrival."""
    engine, _ = served
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for number in range(15):
        engine.add_request(str(number), [number] * 32, params)
    ended = []
    while engine.has_work:
        ended += [int(o.request_id) for o in engine.step() if o.finished]
    assert ended == sorted(ended) and len(ended) == 15


def _first_tokens(engine: Engine, arrivals: dict[int, list[tuple[str, int]]]) -> dict[str, int]:
    """The step of each request's first token; `arrivals`: names and lengths, by step."""
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    first: dict[str, int] = {}
    step = 0
    while engine.has_work or step <= max(arrivals):
        for name, length in arrivals.get(step, ()):
            engine.add_request(name, [zlib.crc32(name.encode()) % 256] * length, params)
        for output in engine.step():
            first.setdefault(output.request_id, step)
        step += 1
    return first


def test_a_long_prompt_does_not_hold_back_short_ones(served: tuple[Engine, HashModel]):
    engine, _ = served
    long = 5 * BATCH_TOKENS  # takes 5 steps alone
    names = [f"short {number}" for number in range(4)]
    arrivals = {0: [("long", long)], 1: [(name, 8) for name in names]}
    first = _first_tokens(engine, arrivals)
    assert [first[name] for name in names] == [1] * 4
    assert first["long"] == 5  # one step later than alone


def test_short_prompts_do_not_starve_a_long_one(served: tuple[Engine, HashModel]):
    """Half of the tokens go to the oldest prompt, whatever else arrives."""
    engine, _ = served
    long = (PAGES - 40) * PAGE_SIZE
    arrivals = {step: [(f"{step} {n}", 20) for n in range(3)] for step in range(1, 30)}
    first = _first_tokens(engine, {0: [("long", long)], **arrivals})
    assert first["long"] <= -(-long // (BATCH_TOKENS // 2 - BATCH // 2))


def test_shares_use_the_whole_budget():
    rng = random.Random(1)
    for _ in range(500):
        lengths = [rng.randint(1, 100) for _ in range(rng.randint(1, 12))]
        prompts = [
            RequestState(str(n), [0] * length, length, SamplingParams(), 0, frozenset(), None)
            for n, length in enumerate(lengths)
        ]
        decoding = rng.randint(0, 20)
        budget = rng.randint(decoding + 1, 300)
        shares = token_shares(decoding, prompts, budget)
        given = [shares[request] for request in prompts]
        assert all(0 <= share <= length for share, length in zip(given, lengths, strict=True))
        assert sum(given) == min(sum(lengths), budget - decoding)
        assert given[0] >= min(lengths[0], (budget - decoding) // 2)
        # Of the others, a longer one gets something only when the shorter ones have all they need.
        order = sorted(range(1, len(lengths)), key=lambda n: lengths[n])
        first_cut = next((i for i, n in enumerate(order) if given[n] < lengths[n]), len(order))
        assert all(given[n] == 0 for n in order[first_cut + 1 :])
