"""Every family divided among ranks, which are threads here, against `transformers` in float32."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.serve.checkpoint import load
from examples.serve.engine import Engine, SamplingParams
from examples.serve.model import Model
from examples.serve.runner import Chunk, Runner
from tests.serve.models import Reference, write
from tests.serve.ranks import ThreadParallel, on_ranks

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers"
)

# What four ranks need: a head each, of attention that has no shared ones and of recurrences.
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
    "deepseek_v2": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "deepseek_v3": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 4},
}
MIXTURES = (
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
    *("qwen3_next", "nemotron_h"),
)
CASES = [
    *((name, ranks, False) for name in SHAPES for ranks in (2, 4)),
    *((name, ranks, True) for name in MIXTURES for ranks in (2, 4)),
]
DTYPE = torch.float16
FIRST, SECOND = (random.Random(seed).choices(range(256), k=n) for seed, n in ((1, 37), (2, 21)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """One of each family, written when it is first asked for."""

    class Written(dict[str, Reference]):
        def __missing__(self, name: str) -> Reference:
            folder = write(tmp_path_factory.mktemp(name), name, **SHAPES[name])
            self[name] = Reference(folder)
            return self[name]

    return Written()


def logits(model: Model) -> torch.Tensor:
    """Of a prompt in two parts, beside another one, and of a decode step of both."""
    runner = Runner(model, 16, 8, model.dtype, 4, False)
    pages, got = ([3, 9, 4, 1, 12], [7, 2, 15]), []
    with runner.backend():
        for chunks in (
            [Chunk(FIRST[:20], 0, pages[0], slot=2)],
            [Chunk(FIRST[20:36], 20, pages[0], slot=2), Chunk(SECOND[:20], 0, pages[1], slot=0)],
            [Chunk(FIRST[36:], 36, pages[0], slot=2), Chunk(SECOND[20:], 20, pages[1], slot=0)],
        ):
            got.append(runner.run(chunks))
    return torch.cat(got)


@pytest.mark.parametrize("name, ranks, experts", CASES)
def test_logits(checkpoints: dict[str, Reference], name: str, ranks: int, experts: bool):
    reference = checkpoints[name]

    def divided(parallel: ThreadParallel) -> tuple[torch.Tensor, int]:
        model, _ = load(reference.folder, "cpu", DTYPE, parallel)
        return logits(model), parallel.meeting.sums

    results = on_ranks(ranks, divided, experts)
    got, sums = results[0]
    assert sums == 3 * len(load(reference.folder, "cpu", DTYPE)[0].blocks)
    for other, _ in results[1:]:
        assert torch.equal(other, got)
    a, b = reference.logits(FIRST), reference.logits(SECOND)
    expected = torch.stack([a[19], a[35], b[19], a[36], b[20]])
    error = (got - expected).square().mean().sqrt() / expected.std()
    alone = (logits(load(reference.folder, "cpu", DTYPE)[0]) - expected).square().mean().sqrt() / expected.std()
    theirs = reference.errors(FIRST, DTYPE).square().mean().sqrt() / expected.std()
    print(name, ranks, experts, float(error), float(alone), float(theirs))
