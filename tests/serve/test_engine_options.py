"""Prefix caching and speculation change how fast an engine is, and none of its tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from examples.serve.engine import Engine, SamplingParams
from examples.serve.model import Model
from examples.serve.runner import Chunk
from examples.serve.speculation import NgramIndex
from tests.serve.hash_model import install, repetitive_token

OPTIONS: dict[str, dict[str, Any]] = {
    "neither": {"prefix_caching": False},
    "prefix caching": {},
    "speculation": {"prefix_caching": False, "speculation": 3, "ngram": 2},
    "both": {"speculation": 5, "ngram": 2},
    "whole prompts": {"chunked_prefill": False, "max_batch_tokens": 136, "speculation": 2},
    "both in small steps": {"speculation": 2, "ngram": 2, "max_batch_tokens": 9},
}
SMALL: dict[str, Any] = {
    "num_pages": 40,
    "page_size": 4,
    "max_batch_size": 8,
    "max_batch_tokens": 32,
}


def _expected(prompt: list[int], params: SamplingParams) -> list[int]:
    tokens = list(prompt)
    for _ in range(params.max_tokens or 0):
        tokens.append(repetitive_token(tokens))
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_the_model(name: str, model: Model, monkeypatch: pytest.MonkeyPatch):
    """Random mixes of prompts that share beginnings, with preemption and cancellation."""
    options = SMALL | OPTIONS[name]
    engine = Engine(model, None, **options)
    pages = install(monkeypatch, engine, repetitive_token)
    rng = random.Random(name)
    prefixes = [rng.choices(range(4), k=24) for _ in range(3)]
    expected: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    steps = preempted = total = 0

    def receive() -> None:
        nonlocal steps, preempted
        before = set(engine._scheduler.running)
        for output in engine.step():
            name = output.request_id
            got[name].append(output.token_id)
            assert got[name] == expected[name][: len(got[name])]
            assert output.finished == (len(got[name]) == len(expected[name]))
            if output.finished:
                del got[name]
        steps += 1
        preempted += len(before & set(engine._scheduler.waiting))
        used = {page for request in engine._scheduler.running for page in request.pages}
        assert engine.stats()["pages_free"] == 40 - len(used)

    for number in range(300):
        size = rng.randint(1, 30)
        prompt = rng.choice(prefixes)[: rng.randint(0, 24)] + rng.choices(range(4), k=size)
        # A stop token is rare, except for those that are sure to come.
        stops = [rng.randrange(4, 300)] if rng.random() < 0.8 else [rng.randrange(4)]
        params = SamplingParams(max_tokens=rng.randint(1, 50), stop_token_ids=stops)
        expected[str(number)], got[str(number)] = _expected(prompt, params), []
        total += len(expected[str(number)])
        engine.add_request(str(number), prompt, params)
        if got and rng.random() < 0.1:
            victim = rng.choice(list(got))
            assert engine.cancel(victim)
            del got[victim]
        for _ in range(rng.randint(0, 8)):
            receive()
    while engine.has_work:
        receive()
    assert not got and preempted > 10
    stats = engine.stats()
    assert stats["pages_free"] == 40 and stats["running"] == stats["waiting"] == 0
    if options.get("speculation"):
        assert stats["accepted_tokens"] > total / 16
        assert stats["drafted_tokens"] > stats["accepted_tokens"] and pages.ahead == 0
    else:
        assert stats["drafted_tokens"] == 0 and pages.ahead > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_model_gives_the_same_tokens(model: Model, temperature: float):
    """Greedy, and drawn by the same random numbers; a repetitive prompt makes guesses."""
    answers = []
    for speculation in (0, 4):
        engine = Engine(model, None, num_pages=40, page_size=4, speculation=speculation, ngram=1)
        params = SamplingParams(
            temperature=temperature, seed=3, max_tokens=30, ignore_eos=True, top_k=3,
            repetition_penalty=1.0, logprobs=2, logit_bias={7: 1.0},
        )  # fmt: skip
        for name, prompt in (("a", [5, 6, 7, 8] * 4), ("b", [9, 3])):
            engine.add_request(name, prompt, params)
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        logprobs: dict[str, list[float]] = {"a": [], "b": []}
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id].append(output.token_id)
                assert output.logprobs is not None
                assert output.logprobs.token_id == output.token_id
                logprobs[output.request_id].append(output.logprobs.logprob)
        answers.append((tokens, logprobs))
        assert (engine.stats()["accepted_tokens"] > 0) == (speculation > 0)
    assert answers[0][0] == answers[1][0]
    for name in ("a", "b"):
        assert answers[0][1][name] == pytest.approx(answers[1][1][name], abs=0.05)


def _serve_mixed(model: Model, **options: Any) -> tuple[dict[str, list[int]], int]:
    """Tokens of requests of which one is cancelled, and how many lost their pages."""
    usual = {"num_pages": 14, "page_size": 4, "max_batch_size": 4, "max_batch_tokens": 24}
    engine = Engine(model, None, batch_invariant=True, **(usual | options))
    tokens: dict[str, list[int]] = {}
    preempted = 0
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    for number in range(5):
        prompt = [5, 6, 7, 8] * 4 + [number // 2] * (1 + 4 * number)
        engine.add_request(str(number), prompt, params)
        tokens[str(number)] = []
    while engine.has_work:
        running = set(engine._scheduler.running)
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
        preempted += len(running & set(engine._scheduler.waiting))
        if len(tokens.get("2", [])) >= 3:
            engine.cancel("2")
            del tokens["2"]
    assert engine.stats()["pages_free"] == 14
    assert (engine.stats()["accepted_tokens"] > 0) == ("speculation" in options)
    return tokens, preempted


@pytest.fixture(scope="module")
def expected(model: Model) -> dict[str, list[int]]:
    tokens, preempted = _serve_mixed(model)
    assert preempted > 0 and all(len(tokens) == 10 for tokens in tokens.values())
    return tokens


@pytest.mark.parametrize(
    "options",
    [{"speculation": 3, "ngram": 1}, {"prefix_caching": False}, {"max_batch_tokens": 9}],
    ids=["speculation", "no caching", "small chunks"],
)
def test_a_real_model_under_preemption_and_cancellation(
    options: dict[str, Any], model: Model, expected: dict[str, list[int]]
):
    """Every bit of the logits is the same: greedy tokens never tie another way."""
    assert _serve_mixed(model, **options)[0] == expected


def test_prefix_caching_saves_what_is_shared(model: Model, monkeypatch: pytest.MonkeyPatch):
    computed = {}
    for caching in (False, True):
        engine = Engine(model, None, num_pages=20, page_size=4, prefix_caching=caching)
        pages = install(monkeypatch, engine, repetitive_token)
        for name in ("first", "second"):
            engine.add_request(name, list(range(17)), SamplingParams(max_tokens=1))
            engine.step()
        computed[caching] = pages.computed
    assert computed == {False: 34, True: 18}


@pytest.mark.parametrize("chunked", [False, True])
def test_prompts_are_divided_or_not(chunked: bool, model: Model, monkeypatch: pytest.MonkeyPatch):
    """Two prompts of 100 tokens, in steps of 132 and their share of one that decodes."""
    engine = Engine(
        model, None, num_pages=40, page_size=4, max_batch_size=4, max_batch_tokens=132,
        chunked_prefill=chunked,
    )  # fmt: skip
    steps: list[list[int]] = []
    pages = install(monkeypatch, engine, repetitive_token)

    def run(chunks: list[Chunk], *others: Any) -> Any:
        steps.append([len(chunk.tokens) for chunk in chunks])
        return pages.run(chunks, *others)

    monkeypatch.setattr(engine._runner, "run", run)
    for name, token in (("a", 1), ("b", 2)):
        engine.add_request(name, [token] * 100, SamplingParams(max_tokens=1))
    while engine.has_work:
        engine.step()
    assert steps == ([[100, 32], [68]] if chunked else [[100], [100]])


def test_index_of_ngrams():
    index = NgramIndex(2)
    tokens = [1, 2, 3, 1, 2]
    assert index.propose(tokens, 3) == [3, 1, 2] and index.propose(tokens, 1) == [3]
    assert index.propose([*tokens, 4], 3) == []
    # The last occurrence counts.
    assert index.propose([*tokens, 4, 0, 1, 2], 3) == [4, 0, 1]
    assert NgramIndex(3).propose([1, 1], 2) == [] and NgramIndex(1).propose([1, 1], 2) == [1]


@pytest.mark.parametrize(
    "options, name",
    [
        ({"speculation": -1}, "speculation"),
        ({"speculation": 1, "ngram": 0}, "ngram"),
        ({"chunked_prefill": False, "max_batch_tokens": 79}, "max_batch_tokens"),
    ],
)
def test_options_out_of_range(model: Model, options: dict[str, int], name: str):
    with pytest.raises(ValueError, match=f"`{name}`"):
        Engine(model, None, num_pages=4, **options)
