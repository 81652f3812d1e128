"""Logits and greedy tokens of the engine, against `transformers` on the same checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from examples.serve.checkpoint import load
from examples.serve.engine import Engine, SamplingParams
from examples.serve.runner import Chunk, Runner
from tests.serve.models import ARCHITECTURES, Reference, write

DTYPES = (torch.bfloat16, torch.float16)
pytestmark = [
    pytest.mark.any_device,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Checkpoint = tuple[Path, Reference]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    known: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in known:
            folder = write(tmp_path_factory.mktemp(name), name)
            known[name] = folder, Reference(folder)
        return known[name]

    return get


def _rounding(reference: Reference, prompt: list[int], dtype: torch.dtype) -> float:
    """1.5 times the largest error of transformers itself, in a dtype, on the same weights."""
    return 1.5 * float(reference.errors(prompt, dtype).abs().max())


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def _serve(engine: Engine, requests: dict[str, list[int]], tokens: int) -> dict[str, list[int]]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for name, prompt in requests.items():
        engine.add_request(name, prompt, params)
    result: dict[str, list[int]] = {name: [] for name in requests}
    while engine.has_work:
        for output in engine.step():
            result[output.request_id].append(output.token_id)
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"]
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits(checkpoint: Callable[[str], Checkpoint], name: str, dtype: torch.dtype):
    """Prompts of two chunks in one batch with another, then a decode step."""
    folder, reference = checkpoint(name)
    model, _ = load(folder, DEVICE, dtype)
    runner = Runner(model, 16, 8, dtype, 4, False)
    first, second = _prompt(37, 1), _prompt(21, 2)
    pages = [3, 9, 4, 1, 12], [7, 2, 15]
    got = []
    with runner.backend():
        got.append(runner.run([Chunk(first[:20], 0, pages[0])])[0])
        got += runner.run([Chunk(first[20:36], 20, pages[0]), Chunk(second[:20], 0, pages[1])])
        got += runner.run([Chunk(first[36:], 36, pages[0]), Chunk(second[20:], 20, pages[1])])
    a, b = reference.logits(first), reference.logits(second)
    expected = torch.stack([a[19], a[35], b[19], a[36], b[20]])
    error = torch.stack(got).cpu() - expected
    theirs = reference.errors(first, dtype)
    assert error.abs().max() <= _rounding(reference, first, dtype)
    assert error.square().mean() <= 1.5**2 * theirs.square().mean()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_of_one_request(checkpoint: Callable[[str], Checkpoint], name: str):
    folder, reference = checkpoint(name)
    engine = Engine(*load(folder, DEVICE), num_pages=8)
    prompt = _prompt(40, 3)
    tokens = _serve(engine, {"a": prompt}, 16)["a"]
    decisive, count = reference.check_greedy(
        prompt, tokens, _rounding(reference, prompt, torch.bfloat16)
    )
    assert count == 16 and decisive >= 6


def test_greedy_tokens_of_64_requests_that_come_and_go(
    checkpoint: Callable[[str], Checkpoint],
):
    """Arrivals over time, cancellations, too few pages for all: what remains is still right."""
    folder, reference = checkpoint("qwen2")
    engine = Engine(
        *load(folder, DEVICE, torch.float16),
        num_pages=60,
        page_size=4,
        max_batch_size=16,
        max_batch_tokens=64,
    )
    rng = random.Random(0)
    shared = _prompt(9, 4)
    prompts = {
        str(i): (shared if i % 3 == 0 else []) + _prompt(rng.randint(1, 30), i) for i in range(64)
    }
    lengths = {name: rng.randint(1, 12) for name in prompts}
    coming, gone = list(prompts), set()
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while coming or engine.has_work:
        for name in coming[:4]:
            params = SamplingParams(temperature=0, max_tokens=lengths[name], ignore_eos=True)
            engine.add_request(name, prompts[name], params)
        live = [n for n in prompts if n not in coming and len(tokens[n]) < lengths[n]]
        del coming[:4]
        if rng.random() < 0.3 and (victims := [n for n in live if n not in gone]):
            victim = rng.choice(victims)
            assert engine.cancel(victim)
            gone.add(victim)
        for output in engine.step():
            assert output.request_id not in gone
            tokens[output.request_id].append(output.token_id)
            assert output.finished == (len(tokens[output.request_id]) == lengths[output.request_id])
    assert engine.stats()["pages_free"] == 60 and 3 <= len(gone) < 30
    decisive = total = 0
    bound = _rounding(reference, prompts["0"], torch.float16)
    for name in prompts:
        assert name in gone or len(tokens[name]) == lengths[name]
        if tokens[name]:
            part = reference.check_greedy(prompts[name], tokens[name], bound)
            decisive, total = decisive + part[0], total + part[1]
    assert total > 200 and decisive > 0.8 * total


def test_greedy_tokens_with_a_shared_prefix(checkpoint: Callable[[str], Checkpoint]):
    folder, reference = checkpoint("qwen3")
    engine = Engine(*load(folder, DEVICE, torch.float16), num_pages=32, page_size=4)
    prefix = _prompt(26, 5)
    _serve(engine, {"first": prefix}, 2)
    prompts = {str(i): prefix + _prompt(3, i) for i in range(3)} | {"same": prefix}
    tokens = _serve(engine, prompts, 8)
    for name, prompt in prompts.items():
        reference.check_greedy(prompt, tokens[name], _rounding(reference, prefix, torch.float16))


def test_keys_and_values_in_fp8(checkpoint: Callable[[str], Checkpoint]):
    """Three bits of mantissa: about 1/16 relative error of each key and value."""
    folder, reference = checkpoint("llama")
    prompt = _prompt(48, 6)
    expected = reference.logits(prompt)[-1]
    model, _ = load(folder, DEVICE)
    errors = {}
    for dtype in (model.dtype, torch.float8_e4m3fn):
        runner = Runner(model, 8, 8, dtype, 4, False)
        with runner.backend():
            got = runner.run([Chunk(prompt, 0, range(6))])[0].cpu()
        errors[dtype] = float((got - expected).square().mean().sqrt() / expected.std())
    assert errors[model.dtype] < errors[torch.float8_e4m3fn] < 0.1
