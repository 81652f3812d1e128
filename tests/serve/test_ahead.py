"""Steps that are launched before the tokens of the step before them are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from examples.serve import engine
from examples.serve.engine import Engine, SamplingParams
from examples.serve.model import Model

PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
DRAWN = replace(PARAMS, temperature=1.0, top_p=0.95, seed=3)


def _engine(model: Model, **options: Any) -> Engine:
    return Engine(model, None, **{"num_pages": 32, "page_size": 4, **options})


def _finish(served: Engine, tokens: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    tokens = {} if tokens is None else tokens
    while served.has_work:
        for output in served.step():
            tokens.setdefault(output.request_id, []).append(output.token_id)
    stats = served.stats()
    assert stats["pages_free"] == stats["pages_total"]
    return tokens


def _alone(model: Model, prompt: list[int], params: SamplingParams = PARAMS) -> list[int]:
    served = _engine(model)
    served.add_request("alone", prompt, params)
    return _finish(served)["alone"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an engine does, in its order: launches, of tokens known or not, and waits."""
    seen: list[str] = []
    launch, wait = Engine._launch, engine.Step.wait

    def launched(self, scheduled, tokens=None):
        seen.append("launch" if tokens is None else "ahead")
        return launch(self, scheduled, tokens)

    def waited(self):
        seen.append("wait")
        return wait(self)

    monkeypatch.setattr(Engine, "_launch", launched)
    monkeypatch.setattr(engine.Step, "wait", waited)
    return seen


def test_the_next_step_is_launched_before_the_tokens_are_waited_for(model: Model, events: list):
    served = _engine(model)
    served.add_request("a", [1, 2, 3], replace(PARAMS, max_tokens=5))
    served.add_request("b", [4], replace(PARAMS, max_tokens=4))
    _finish(served)
    # The fourth step ends b, the one after needs a alone; the fifth is the last.
    ahead = ["ahead", "wait"]
    assert events == ["launch", *ahead, *ahead, *ahead, "wait", "launch", "wait"]


def test_who_waits_is_not_passed_over(model: Model, events: list):
    served = _engine(model, max_batch_size=2)
    served.add_request("a", [1, 2, 3], PARAMS)
    served.step()
    served.add_request("b", [4], PARAMS)
    assert [output.request_id for output in served.step()] == ["a"]
    assert {output.request_id for output in served.step()} == {"a", "b"}
    assert events == ["launch", "ahead", "wait", "wait", "launch", "ahead", "wait"]


def test_a_token_ends_a_request_whose_next_step_is_under_way(model: Model, events: list):
    prompts = {"a": [1, 2, 3], "b": [9, 8, 7, 6, 5], "c": [30]}
    alone = {name: _alone(model, prompt, DRAWN) for name, prompt in prompts.items()}
    end = next(i for i in range(3, 16) if alone["b"][i] not in alone["b"][:i])
    events.clear()
    served = _engine(model)
    for name, prompt in prompts.items():
        stops = alone["b"][end : end + 1] if name == "b" else []
        served.add_request(name, prompt, replace(DRAWN, stop_token_ids=stops))
    tokens = _finish(served)
    assert tokens == {**alone, "b": alone["b"][: end + 1]}
    assert events.count("ahead") == 14  # the step after the one that was under way is not


def test_cancelled_while_the_next_step_is_under_way(model: Model):
    """Its name comes back at once with another prompt, and gets nothing that was for the first."""
    expected = {"a": _alone(model, [1, 2, 3]), "b": _alone(model, [50, 60])}
    served = _engine(model, num_pages=12)
    served.add_request("a", [1, 2, 3], PARAMS)
    served.add_request("b", [9] * 9, PARAMS)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(3):
        tokens["a"] += [o.token_id for o in served.step() if o.request_id == "a"]
    assert served.cancel("b")
    served.add_request("b", [50, 60], PARAMS)
    assert _finish(served, tokens) == expected


def test_all_cancelled_while_a_step_is_under_way(model: Model, events: list):
    served = _engine(model)
    served.add_request("a", [1, 2, 3], PARAMS)
    served.step()
    assert served.cancel("a") and not served.has_work
    served.add_request("b", [4, 5], replace(PARAMS, max_tokens=1))
    assert [output.request_id for output in served.step()] == ["b"]
    assert events == ["launch", "ahead", "wait", "launch", "wait"]
    served.add_request("a", [1, 2, 3], PARAMS)
    served.step()
    served.cancel("a")
    assert served.step() == [] and served._ahead is None


def test_pages_of_others_are_not_taken_ahead(model: Model, events: list):
    """Nine pages for two requests that end with five each: one has to yield, in its turn."""
    expected = {name: _alone(model, [token] * 4) for name, token in (("a", 1), ("b", 2))}
    events.clear()
    served = _engine(model, num_pages=9)
    for name, token in (("a", 1), ("b", 2)):
        served.add_request(name, [token] * 4, PARAMS)
    preempted = False
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    while served.has_work:
        before = served.stats()["running"]
        for output in served.step():
            tokens[output.request_id].append(output.token_id)
        preempted |= served.stats()["waiting"] > 0 and before == 2
    assert tokens == expected and preempted and events.count("ahead") > 10


@pytest.mark.parametrize("what", ["run", "sample"])
def test_no_token_is_lost_when_a_launch_fails(
    model: Model, what: str, monkeypatch: pytest.MonkeyPatch
):
    expected = {"a": _alone(model, [1, 2, 3]), "b": _alone(model, [7] * 6)}
    served = _engine(model)
    served.add_request("a", [1, 2, 3], PARAMS)
    served.add_request("b", [7] * 6, PARAMS)
    holder = served._runner if what == "run" else engine
    works, calls = getattr(holder, what), 0

    def fails_at_times(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise RuntimeError("out of something")
        return works(*args)

    monkeypatch.setattr(holder, what, fails_at_times)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    failures = 0
    while served.has_work:
        try:
            for output in served.step():
                tokens[output.request_id].append(output.token_id)
        except RuntimeError:
            failures += 1
    assert tokens == expected and failures > 4
    assert served.stats()["pages_free"] == served.stats()["pages_total"]
