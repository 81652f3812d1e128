"""20,000 requests on a GPU, with overload, cancellations and CUDA graphs: nothing is lost or kept.

`test_scheduling` sends as many through the scheduler alone, where there is no GPU.
"""

from __future__ import annotations

import random
import resource
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from examples.serve import checkpoint
from examples.serve.engine import Engine, SamplingParams
from examples.serve.model import Model
from examples.serve.runner import Chunk, Runner
from examples.serve.warmup import warm_up

PAGES, PAGE_SIZE, BATCH = 400, 8, 64
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {"top_k": 20, "top_p": 0.9},
    {"top_p": 0.8, "min_p": 0.05},
)


@dataclass
class _Memory:
    """Bytes, while no request is served."""

    allocated: int
    reserved: int
    host: int


@dataclass
class _Load:
    """Clients of an engine, and what became of their requests."""

    engine: Engine
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    sent: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    preempted: int = 0
    greedy: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.missing: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.prefixes = [self.rng.choices(range(256), k=40) for _ in range(6)]

    def serve(self, count: int) -> None:
        """Send requests in waves, at times faster than they are served, until all have ended."""
        while count:
            overload = self._overload
            wave = min(count, self.rng.randint(16, 64) if overload else self.rng.randint(1, 16))
            for _ in range(wave):
                self.send()
            count -= wave
            for _ in range(self.rng.randint(1, 2) if overload else self.rng.randint(1, 9)):
                self.step()
            if self.rng.random() < 0.01 or not count:
                while self.engine.has_work:
                    self.step()

    @property
    def _overload(self) -> bool:
        return self.sent // 500 % 3 == 2

    def send(self) -> None:
        rng, name = self.rng, str(self.sent)
        self.sent += 1
        prompt = rng.choice(self.prefixes)[: rng.randint(0, 40)]
        prompt = prompt + rng.choices(range(256), k=rng.randint(1, 40))
        # Long answers outgrow the pages that there were when they began.
        length = rng.randint(1, 120 if self._overload else 30)
        if rng.random() < 0.01:
            length = 2 * PAGES * PAGE_SIZE  # would not fit an empty cache
        sampling = SAMPLING[self.sent % len(SAMPLING)]
        try:
            self.engine.add_request(
                name, prompt, SamplingParams(**sampling, max_tokens=length, ignore_eos=True)
            )
        except ValueError as refusal:
            self.reasons[str(refusal).split(":")[0]] += 1
            return
        self.missing[name], self.tokens[name], self.prompts[name] = length, [], prompt
        if rng.random() < 0.1:  # whoever it is: waiting, in its prompt, or decoding
            victim = rng.choice(list(self.missing))
            assert self.engine.cancel(victim)
            self._end(victim, "cancelled")

    def step(self) -> None:
        running = {request.id for request in self.engine._scheduler.running}
        for output in self.engine.step():
            name = output.request_id
            assert 0 <= output.token_id < 257
            self.tokens[name].append(output.token_id)
            self.missing[name] -= 1
            assert output.finished == (self.missing[name] == 0)
            if output.finished:
                self._end(name, str(output.reason))
        self.steps += 1
        self.preempted += len(running & {request.id for request in self.engine._scheduler.waiting})
        free = self.engine.stats()["pages_free"]
        assert free == PAGES - len({p for r in self.engine._scheduler.running for p in r.pages})

    def _end(self, name: str, reason: str) -> None:
        del self.missing[name]
        prompt, tokens = self.prompts.pop(name), self.tokens.pop(name)
        self.reasons[reason] += 1
        # Every 25th greedy one is looked at afterwards.
        if reason == "length" and int(name) % (25 * len(SAMPLING)) == len(SAMPLING) - 1:
            self.greedy[name] = prompt, tokens

    def memory(self) -> _Memory:
        # The last step's index tensors are alive: the same ones at every measurement.
        self.engine.add_request("measure", [7] * 3, SamplingParams(temperature=0, max_tokens=2))
        while self.engine.has_work:
            self.engine.step()
        torch.cuda.synchronize()
        return _Memory(
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
        )


def _check_greedy(model: Model, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the best after those before it, alone, from an empty cache, without a graph."""
    pages = -(-(len(prompt) + len(tokens)) // PAGE_SIZE)
    runner = Runner(model, pages * len(tokens), PAGE_SIZE, model.dtype, len(tokens), False)
    chunks = [
        Chunk(prompt + tokens[:n], 0, range(n * pages, (n + 1) * pages)) for n in range(len(tokens))
    ]
    with runner.backend():
        logits = runner.run(chunks)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    # float16 loses 1 % of a standard deviation; another request's keys cost far more.
    assert bool((logits.amax(1) - chosen <= 0.05 * logits.std(1)).all())


@pytest.mark.gpu
def test_20000_requests_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """All end with a reason; memory after 2,000 requests is that after 20,000."""
    model, tokenizer = checkpoint.load(None, "cuda", torch.float16)
    engine = Engine(
        model,
        tokenizer,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        max_batch_size=BATCH,
        max_batch_tokens=512,
        use_cuda_graph=True,
        max_waiting=BATCH,
    )
    warm_up(engine, BATCH)
    compiled = engine.stats()["compile_seconds"]
    replays = _count_replays(engine._runner, monkeypatch)
    load = _Load(engine)
    load.serve(2000)
    before, graphs = load.memory(), len(engine._runner._graphs)
    load.serve(18000)
    after = load.memory()
    print(load.reasons, f"{load.steps} steps, {len(replays)} of graphs, {load.preempted} preempted")
    print(before, after)
    assert load.sent == sum(load.reasons.values()) == 20000 and not load.missing
    assert set(load.reasons) == {"length", "cancelled", "too long", "over capacity"}
    assert min(load.reasons.values()) > 100 and load.preempted > 30
    stats = engine.stats()
    assert stats["pages_free"] == stats["pages_total"] == PAGES
    assert stats["running"] == stats["waiting"] == 0
    assert stats["compile_seconds"] == compiled, "a request compiled something"
    # Graphs of 1, 2, 4, ..., 64 requests, captured once; they serve a good part of the steps.
    assert graphs == len(engine._runner._graphs) == 7 and len(replays) > 0.2 * load.steps
    assert after.allocated == before.allocated
    assert after.reserved - before.reserved <= 20 << 20, "more than a segment of the allocator"
    assert after.host - before.host <= 64 << 20
    assert len(load.greedy) > 50
    for prompt, tokens in load.greedy.values():
        _check_greedy(model, prompt, tokens)


def _count_replays(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    replays: list[None] = []
    replay = runner._replay

    def counted(*args: object) -> torch.Tensor:
        replays.append(None)
        return replay(*args)

    monkeypatch.setattr(runner, "_replay", counted)
    return replays
