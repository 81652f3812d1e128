"""Every family divided among ranks, which are threads here, against `transformers` in float32."""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from examples.serve.checkpoint import load
from examples.serve.engine import Engine, SamplingParams
from examples.serve.model import Model
from examples.serve.runner import Chunk, Runner
from tests.serve.models import Reference, write
from tests.serve.ranks import ThreadParallel, on_ranks

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

_FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
# What four ranks need: a head each where ranks share none. Others have two key/value heads.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {},
    "qwen3_moe": {},
    "gemma2": {},
    "gemma3": {},
    "gpt_oss": {},
    "deepseek_v2": _FOUR_HEADS,
    "deepseek_v3": _FOUR_HEADS,
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 4},
}
MIXTURES = (
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
    *("qwen3_next", "nemotron_h"),
)
CASES = [
    *((name, ranks, False) for name in SHAPES for ranks in (2, 4)),
    *((name, 2, True) for name in MIXTURES),
    *((name, 4, True) for name in ("mixtral", "qwen3_next")),
]
DTYPE = torch.float16
# Routers are sure of their choice for all of these tokens: the next expert has less by more
# than rounding can change, in each of the checkpoints.
FIRST, SECOND = (random.Random(seed).choices(range(256), k=n) for seed, n in ((18, 13), (19, 7)))


class _Checkpoints(dict[str, Reference]):
    """One of each family, written when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory

    def __missing__(self, name: str) -> Reference:
        self[name] = Reference(write(self.factory.mktemp(name), name, **SHAPES[name]))
        return self[name]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> _Checkpoints:
    return _Checkpoints(tmp_path_factory)


def _logits(model: Model) -> torch.Tensor:
    """A prompt in two parts, the second beside another prompt, and a decode step of both."""
    runner = Runner(model, 16, 4, model.dtype, 4, False)
    one, two = {"pages": [3, 9, 4, 1], "slot": 2}, {"pages": [7, 2], "slot": 0}
    with runner.backend():
        got = [
            runner.run([Chunk(FIRST[:7], 0, **one)]),
            runner.run([Chunk(FIRST[7:12], 7, **one), Chunk(SECOND[:6], 0, **two)]),
            runner.run([Chunk(FIRST[12:], 12, **one), Chunk(SECOND[6:], 6, **two)]),
        ]
    return torch.cat(got)


@pytest.mark.parametrize(
    "name, ranks, experts", CASES, ids=lambda v: {True: "experts", False: "parts"}.get(v, str(v))
)
def test_logits(checkpoints: _Checkpoints, name: str, ranks: int, experts: bool):
    reference = checkpoints[name]

    def divided(parallel: ThreadParallel) -> tuple[torch.Tensor, int, int]:
        model, _ = load(reference.folder, "cpu", DTYPE, parallel)
        return _logits(model), len(model.blocks), parallel.meeting.sums

    results = on_ranks(ranks, divided, experts)
    got, blocks, sums = results[0]
    assert sums == 3 * blocks, "a sum for each part of the model, in each of three steps"
    for other, *_ in results[1:]:
        assert torch.equal(other, got)
    a, b = reference.logits(FIRST), reference.logits(SECOND)
    error = got - torch.stack([a[6], a[11], b[5], a[12], b[6]])
    theirs = reference.errors(FIRST, DTYPE)
    # The ranks' sums round once more than the whole.
    assert error.abs().max() <= 2 * theirs.abs().max()
    assert error.square().mean(1).max() <= 2**2 * theirs.square().mean()


@pytest.mark.parametrize("name, experts", [("gemma3", False), ("mixtral", True)])
def test_greedy_tokens(checkpoints: _Checkpoints, name: str, experts: bool):
    """An engine on each rank: equal beginnings, prompts in parts, too few pages for all."""
    reference = checkpoints[name]
    prompts = {"a": FIRST + SECOND, "b": FIRST[:9], "c": FIRST[3:4], "d": FIRST[:9] + SECOND[:2]}

    def generate(parallel: ThreadParallel) -> dict[str, list[int]]:
        model, _ = load(reference.folder, "cpu", DTYPE, parallel)
        engine = Engine(model, None, num_pages=8, page_size=4, max_batch_size=3, max_batch_tokens=8)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        for request, prompt in prompts.items():
            engine.add_request(request, prompt, params)
        tokens: dict[str, list[int]] = {request: [] for request in prompts}
        while engine.has_work:
            for output in engine.step():
                tokens[output.request_id].append(output.token_id)
        assert engine.stats()["pages_free"] == engine.stats()["pages_total"]
        return tokens

    tokens, other = on_ranks(2, generate, experts)
    assert tokens == other
    rounding = 2 * float(reference.errors(prompts["a"], DTYPE).abs().max())
    checked = [reference.check_greedy(prompts[name], tokens[name], rounding) for name in prompts]
    decisive, total = (sum(part) for part in zip(*checked, strict=True))
    assert total == 4 * len(prompts) and decisive >= 0.7 * total
