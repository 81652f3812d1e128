"""Warm-up of the serving example: it leaves no pages in use, and nothing to compile."""

from __future__ import annotations

import pytest
import torch

from examples.serve.engine import Engine, SamplingParams, load
from examples.serve.warmup import PROMPTS, warm_up
from flashinfer.jit.attention.config import choose_tile_q
from tests.serve.fake_engine import FakeEngine


@pytest.mark.parametrize("size, sizes", [(1, {1}), (6, {1, 2, 4, 6}), (16, {1, 2, 4, 8, 16})])
def test_every_batch_size_and_kind_of_request(size: int, sizes: set[int]):
    engine = FakeEngine(num_pages=512, max_batch_size=size)
    seen = set()
    engine.on_step = lambda: seen.add(len(engine.waiting) + len(engine.running))
    assert warm_up(engine, size) == 0.0
    assert seen == sizes and not engine.has_work and engine.pages_free == 512
    assert {len(prompt) for prompt, _ in engine.seen} == {1, 2, 4, 8, 16, 32, 64, 128, 1000}
    prompts = [prompt for prompt, _ in engine.seen if len(prompt) > 1]
    assert len({prompt[0] for prompt in prompts}) == len(prompts), "prefixes would be shared"
    assert {p.temperature for _, p in engine.seen} == {0.0, 1.0}
    assert any(p.min_p and p.top_k and p.top_p < 1 for _, p in engine.seen)


def test_prompts_that_do_not_fit_are_left_out():
    engine = FakeEngine(num_pages=16, page_size=4)
    engine.on_step = lambda: setattr(engine, "compile_seconds", 3.0)
    assert warm_up(engine, 8) == 1.5
    assert max(len(prompt) for prompt, _ in engine.seen) == 32 and not engine.has_work


@pytest.mark.parametrize("group", range(1, 33))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prompts_meet_every_tile_of_attention(group: int, head_dim: int):
    def tiles(lengths) -> set[int]:
        return {choose_tile_q(n * group, n * group, head_dim) for n in lengths}

    assert tiles(PROMPTS) == tiles(range(2, 3000))


@pytest.mark.any_device
def test_no_request_after_it_compiles():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load(None, device, torch.bfloat16)
    engine = Engine(
        model, tokenizer, num_pages=128, max_batch_size=4, use_cuda_graph=device == "cuda"
    )
    warm_up(engine, 4)
    compiled = engine.stats()["compile_seconds"]
    for number, length in enumerate((1, 3, 17, 90, 700)):
        params = SamplingParams(top_k=5 * number, top_p=1 - 0.1 * number, max_tokens=3)
        engine.add_request(str(number), [7 * number] * length, params)
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats["compile_seconds"] == compiled
    assert stats["pages_free"] == stats["pages_total"]
