"""Greedy tokens of mixtures, latent attention and hybrids, against `transformers` in float32."""

from __future__ import annotations

import random
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from examples.serve import ahead, kernels
from examples.serve.checkpoint import load
from examples.serve.engine import Engine, SamplingParams
from examples.serve.state import RequestState
from tests.serve.models import FAMILIES, Reference, write

pytestmark = [
    pytest.mark.any_device,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 3


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


# Every model's: index arrays, sampling; and the backend of these tests.
COMMON = {"get_batch_indices_positions", "top_k", "TopKTieBreak", "reference_backend"}
SAMPLING = {
    *("softmax", "sampling_from_probs", "min_p_sampling_from_probs"),
    *("top_k_renorm_probs", "top_p_renorm_probs"),
}


def _documented(name: str) -> set[str]:
    """Operations of a model by the table of docs/models.md."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    (row,) = re.findall(rf"^\| [^|]*<!-- {name} --> \|(.*)\|$", text, re.MULTILINE)
    return set(re.findall(r"`([\w.]+)`", row))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Operations that are reached from here on, by their names."""
    names: set[str] = set()
    look_up = kernels.__getattr__

    def recorded(name: str) -> Any:
        value = look_up(name)
        if not isinstance(value, ModuleType):
            names.add(name)
            return value
        return _Recorded(value, names)

    monkeypatch.setattr(kernels, "__getattr__", recorded)
    return names


class _Recorded:
    """A module of operations."""

    def __init__(self, module: ModuleType, names: set[str]) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        short = self._module.__name__.split(".")[-1]
        self._names.add(f"{short}.{name}")
        return getattr(self._module, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: set[str], name: str
):
    """Prompts in parts beside requests that decode, an equal beginning, too few pages for all."""
    reference = Reference(write(tmp_path, name))
    model, _ = load(tmp_path, DEVICE, torch.float16)
    pages = 6 if model.has_states else 7
    engine = Engine(model, None, num_pages=pages, page_size=4, max_batch_size=3, max_batch_tokens=8)
    scheduler, preempted = engine._scheduler, []
    release = scheduler.release

    def counted(request: RequestState) -> None:
        if request.computed and request.drawn < TOKENS:
            preempted.append(request.id)
        release(request)

    monkeypatch.setattr(scheduler, "release", counted)
    shared = _prompt(9, 0)
    prompts = {"a": shared + _prompt(4, 1), "b": _prompt(11, 2), "c": [7], "d": shared}
    tokens: dict[str, list[int]] = {request: [] for request in prompts}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for request, prompt in prompts.items():
        engine.add_request(request, prompt, params)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"] and preempted
    assert (stats["cached_tokens"] > 0) == (not model.has_states)
    assert sorted(scheduler._slots) == [0, 1, 2]
    # Compiling ahead reaches no other operations, in threads, and works for these layers.
    monkeypatch.setattr(ahead, "PROMPTS", (2,))
    ahead.compile_all(model, 4, torch.float16, False)
    assert called - COMMON - SAMPLING == _documented(name)
    rounding = 1.5 * float(reference.errors(prompts["a"], torch.float16).abs().max())
    decisive = total = 0
    for request, prompt in prompts.items():
        part = reference.check_greedy(prompt, tokens[request], rounding)
        decisive, total = decisive + part[0], total + part[1]
    assert total == len(prompts) * TOKENS and decisive >= 0.7 * total


def test_a_state_takes_each_token_once(tmp_path: Path):
    """What a batch cannot promise for states is refused."""
    write(tmp_path, "nemotron_h")
    model, _ = load(tmp_path, DEVICE)
    for options in ({"speculation": 2}, {"batch_invariant": True}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be .*NemotronH"):
            Engine(model, None, num_pages=8, **options)
    engine = Engine(model, None, num_pages=8)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    engine.step()
    engine._runner._computed[engine._live["a"].slot] -= 1  # as after a step that failed
    with pytest.raises(RuntimeError, match="has seen 3 tokens, the request continues at 4"):
        engine._ahead = None
        engine.step()
