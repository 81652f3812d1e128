"""What the engine does with requests: sampling, ends, refusals, pages, order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from examples.serve.engine import Engine, Output, SamplingParams
from examples.serve.model import Model
from examples.serve.tokens import ByteTokenizer, TextStream

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def _engine(model: Model, **options: Any) -> Engine:
    return Engine(model, ByteTokenizer(), **{"num_pages": 32, "page_size": 4, **options})


def _outputs(engine: Engine) -> Iterator[Output]:
    while engine.has_work:
        yield from engine.step()


def _finish(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for output in _outputs(engine):
        tokens.setdefault(output.request_id, []).append(output.token_id)
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"]
    assert stats["running"] == stats["waiting"] == 0
    return tokens


def test_a_seed_gives_the_same_tokens_alone_and_among_others(model: Model):
    params = SamplingParams(seed=7, top_k=40, top_p=0.95, min_p=0.01, max_tokens=12)
    params.ignore_eos = True
    engine = _engine(model)
    engine.add_request("alone", "abc", params)
    alone = _finish(engine)["alone"]
    engine.add_request("x", "something else", replace(params, seed=8))
    engine.add_request("greedy", "abc", replace(params, temperature=0))
    engine.add_request("again", "abc", params)
    engine.add_request("other", "abc", replace(params, seed=9))
    tokens = _finish(engine)
    assert tokens["again"] == alone
    assert len({tuple(tokens[name]) for name in ("again", "other", "greedy")}) == 3


@pytest.mark.parametrize("filter", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_filter_that_leaves_one_token_is_greedy(model: Model, filter: dict[str, Any]):
    engine = _engine(model)
    engine.add_request("greedy", "hello", GREEDY)
    expected = _finish(engine)["greedy"]
    engine.add_request("a", "hello", replace(GREEDY, temperature=1.0, seed=1, **filter))
    # A neighbour without the filter is not filtered.
    engine.add_request("b", "hello", replace(GREEDY, temperature=1.0, seed=1))
    tokens = _finish(engine)
    assert tokens["a"] == expected != tokens["b"]


def test_draws_follow_the_distribution(model: Model):
    """First tokens under many seeds; the temperature flattens them."""
    engine = _engine(model, num_pages=800, max_batch_size=400)
    distinct = {}
    for temperature in (0.3, 3.0):
        for seed in range(400):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=1)
            engine.add_request(str(seed), "ab", params)
        tokens = _finish(engine)
        distinct[temperature] = len({t for request in tokens.values() for t in request})
    assert 1 < distinct[0.3] < distinct[3.0]


def test_a_stop_token_ends_a_request_without_its_text(model: Model):
    engine = _engine(model)
    engine.add_request("a", "hello", GREEDY)
    outputs = list(_outputs(engine))
    assert [o.reason for o in outputs] == [None] * 15 + ["length"]
    assert "".join(o.text for o in outputs) == ByteTokenizer().decode([o.token_id for o in outputs])
    tokens = [o.token_id for o in outputs]
    stop = tokens[6]
    first = tokens.index(stop)
    engine.add_request("b", "hello", replace(GREEDY, stop_token_ids=[stop]))
    again = list(_outputs(engine))
    assert [o.token_id for o in again] == tokens[: first + 1]
    assert again[-1].finished and again[-1].reason == "stop"
    assert "".join(o.text for o in again) == ByteTokenizer().decode(tokens[:first])


def test_end_of_text_ends_unless_ignored(model: Model, monkeypatch: pytest.MonkeyPatch):
    engine = _engine(model)
    engine.add_request("a", "hello", GREEDY)
    tokens = _finish(engine)["a"]
    monkeypatch.setattr(
        model, "config", replace(model.config, eos_token_ids=frozenset(tokens[2:3]))
    )
    end = tokens.index(tokens[2])
    engine.add_request("stops", "hello", replace(GREEDY, ignore_eos=False))
    engine.add_request("goes on", "hello", GREEDY)
    assert _finish(engine) == {"stops": tokens[: end + 1], "goes on": tokens}


@pytest.mark.parametrize(
    "prompt, changes, message",
    [
        ("", {}, "`prompt` must not be empty"),
        ([], {}, "`prompt` must not be empty"),
        ([5, 257], {}, "ids from 0 to 256, got 257"),
        ([5, -1], {}, "ids from 0 to 256, got -1"),
        ([5, "x"], {}, "ids from 0 to 256, got x"),
        ("x" * 113, {}, "113 tokens of `prompt` and 16 .* the model's 128 positions"),
        ("x" * 70, {}, "need 22 pages of the KV cache, which has 20"),
        ("x", {"temperature": -1.0}, "`temperature`.*got -1"),
        ("x", {"temperature": float("nan")}, "`temperature`.*got nan"),
        ("x", {"top_k": -2}, "`top_k`.*got -2"),
        ("x", {"repetition_penalty": 0.0}, "`repetition_penalty`.*got 0"),
        ("x", {"presence_penalty": float("inf")}, "`presence_penalty`.*got inf"),
        ("x", {"logit_bias": {257: 1.0}}, "`logit_bias`.*0 to 256"),
        ("x", {"logit_bias": {"a": 1.0}}, "`logit_bias`.*got 'a'"),
        ("x", {"logprobs": 21}, "`logprobs`.*20.*got 21"),
        ("x", {"top_k": 1.5}, "`top_k`.*got 1.5"),
        ("x", {"top_p": 0.0}, "`top_p`.*got 0"),
        ("x", {"min_p": 1.5}, "`min_p`.*got 1.5"),
        ("x", {"seed": -1}, "`seed`.*got -1"),
        ("x", {"max_tokens": 0}, "`max_tokens`.*got 0"),
    ],
)
def test_a_refused_request_leaves_the_engine_as_it_was(
    model: Model, prompt: Any, changes: dict[str, Any], message: str
):
    engine = _engine(model, num_pages=20)
    with pytest.raises(ValueError, match=message):
        engine.add_request("a", prompt, replace(GREEDY, **changes))
    assert not engine.has_work and engine.step() == []
    assert not engine.cancel("a")


def test_names_and_the_queue_are_limited(model: Model):
    engine = _engine(model, max_waiting=2)
    engine.add_request("a", "x", GREEDY)
    with pytest.raises(ValueError, match="'a' is being served"):
        engine.add_request("a", "x", GREEDY)
    engine.add_request("b", "x", GREEDY)
    with pytest.raises(ValueError, match="over capacity: 2 requests wait"):
        engine.add_request("c", "x", GREEDY)
    engine.step()
    engine.add_request("c", "x", GREEDY)
    assert {name: len(tokens) for name, tokens in _finish(engine).items()} == {
        "a": 15, "b": 15, "c": 16,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_pages": 0}, "`num_pages`.*got 0"),
        ({"page_size": 0}, "`page_size`.*got 0"),
        ({"max_batch_size": 8, "max_batch_tokens": 7}, "`max_batch_tokens`.*got 7"),
        ({"kv_dtype": torch.float32}, "`kv_dtype`.*got torch.float32"),
    ],
)
def test_refused_engines(model: Model, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        _engine(model, **options)


def test_prompts_in_chunks_and_batches_give_the_same(model: Model):
    prompts = {str(i): "a prompt of some length"[: 23 - 3 * i] for i in range(5)}
    results = []
    for options in ({}, {"max_batch_tokens": 4, "max_batch_size": 3}, {"max_batch_size": 1}):
        engine = _engine(model, **options)
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, replace(GREEDY, max_tokens=6))
        results.append(_finish(engine))
    assert results[0] == results[1] == results[2]


def test_preempted_requests_end_with_the_same_tokens(model: Model):
    prompts = {str(i): chr(97 + i) * 8 for i in range(6)}
    results, most = [], []
    for pages in (64, 9):  # one request takes 6 pages in the end, 2 at first
        engine = _engine(model, num_pages=pages)
        running, tokens = [], {name: [] for name in prompts}
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, GREEDY)
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id].append(output.token_id)
            running.append(engine.stats()["running"])
        assert engine.stats()["pages_free"] == pages
        results.append(tokens)
        most.append((max(running), any(b < a for a, b in zip(running, running[1:], strict=False))))
    assert results[0] == results[1] and all(len(t) == 16 for t in results[0].values())
    assert most[0][0] == 6 and 1 < most[1][0] < 6


def test_a_prefix_is_computed_once(model: Model, monkeypatch: pytest.MonkeyPatch):
    engine = _engine(model)
    computed: list[int] = []
    run = engine._runner.run

    def spy(chunks, *tokens):
        computed.extend(len(chunk.tokens) for chunk in chunks)
        return run(chunks, *tokens)

    monkeypatch.setattr(engine._runner, "run", spy)
    one = replace(GREEDY, max_tokens=1)
    prompts = ["x" * 16 + "abc", "x" * 16 + "d", "x" * 16, "x" * 3]
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, one)
        _finish(engine)
    # Full pages of 4 are shared, but at least one token is computed, for its logits.
    assert computed == [19, 1, 4, 3]


def test_requests_at_the_same_time_share_pages(model: Model):
    engine = _engine(model)
    engine.add_request("a", "x" * 17, GREEDY)
    engine.step()
    assert engine.stats()["pages_free"] == 32 - 5
    engine.add_request("b", "x" * 17, GREEDY)
    engine.step()  # was under way before b came
    engine.step()
    assert engine.stats()["pages_free"] == 32 - 6
    assert engine.cancel("a") and not engine.cancel("a")
    assert engine.stats()["pages_free"] == 32 - 5
    assert len(_finish(engine)["b"]) == 15


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go_leave_no_page_behind(model: Model, seed: int):
    """Overload, cancellations in every state, few pages: everything ends, with a reason."""
    rng = random.Random(seed)
    engine = _engine(model, num_pages=16, max_batch_size=5, max_batch_tokens=12, max_waiting=8)
    ended: dict[str, str] = {}
    live: list[str] = []
    for number in range(60):
        name = str(number)
        prompt = rng.choice(["x" * 9, "yz" * 3, "w"]) + "a" * rng.randint(0, 60)
        try:
            engine.add_request(name, prompt, replace(GREEDY, max_tokens=rng.randint(1, 5)))
            live.append(name)
        except ValueError as refusal:
            ended[name] = str(refusal)
        if live and rng.random() < 0.3:
            name = live.pop(rng.randrange(len(live)))
            assert engine.cancel(name)
            ended[name] = "cancelled"
        if rng.random() < 0.6:
            for output in engine.step():
                if output.finished:
                    live.remove(output.request_id)
                    ended[output.request_id] = str(output.reason)
    for output in _outputs(engine):
        if output.finished:
            ended[output.request_id] = str(output.reason)
    assert engine.stats()["pages_free"] == 16 and len(ended) == 60
    kinds = {reason.split()[0] for reason in ended.values()}
    assert kinds >= {"length", "cancelled", "too"}


def test_text_waits_for_whole_characters():
    text = "naïve 漢字 🙂!"
    stream = TextStream(ByteTokenizer())
    pieces = [stream.push(token) for token in text.encode()]
    assert "".join(pieces) == text and "\ufffd" not in pieces
    broken = TextStream(ByteTokenizer())
    assert [broken.push(t) for t in (65, 0xF0)] == ["A", ""] and broken.flush() == "\ufffd"
