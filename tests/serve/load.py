"""Clients that send more than an engine can serve, and cancel some of it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import torch

from examples.serve.engine import Engine, SamplingParams
from examples.serve.model import Model
from examples.serve.runner import Chunk, Runner

SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {"top_k": 20, "top_p": 0.9},
    {"top_p": 0.8, "min_p": 0.05},
)


@dataclass
class Load:
    """Clients of an engine, and what became of their requests.

    Attributes
    ----------
    engine : Engine
        It serves nobody else.
    period : int
        Requests after which overload begins or ends: it lasts for every third so many.
    longest : int
        Most new tokens of a request in overload; elsewhere a quarter.
    pause : int
        Most steps between two waves of requests, except in overload, which waits for two.
    checked : int
        Of so many greedy requests, one is kept for `check_greedy`.
    sent, steps, preempted : int
        How many there were.
    reasons : Counter
        Why requests ended, or were refused.
    greedy : dict
        Prompt and tokens of the requests to check.
    """

    engine: Engine
    period: int = 500
    longest: int = 120
    pause: int = 9
    checked: int = 25
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
        self.pages = self.engine.stats()["pages_total"]

    def serve(self, count: int) -> None:
        """Send requests in waves, at times faster than they are served, until all have ended."""
        while count:
            overload = self._overload
            wave = min(count, self.rng.randint(16, 64) if overload else self.rng.randint(1, 16))
            for _ in range(wave):
                self.send()
            count -= wave
            for _ in range(self.rng.randint(1, 2) if overload else self.rng.randint(1, self.pause)):
                self.step()
            if self.rng.random() < 0.01 or not count:
                while self.engine.has_work:
                    self.step()

    @property
    def _overload(self) -> bool:
        return self.sent // self.period % 3 == 2

    def send(self) -> None:
        rng, name = self.rng, str(self.sent)
        self.sent += 1
        prompt = rng.choice(self.prefixes)[: rng.randint(0, 40)]
        prompt = prompt + rng.choices(range(256), k=rng.randint(1, 40))
        # Long answers outgrow the pages that there were when they began.
        length = rng.randint(1, self.longest if self._overload else self.longest // 4)
        if rng.random() < 0.01:
            length = 2 * self.pages * self.engine.page_size  # would not fit an empty cache
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
        used = {page for request in self.engine._scheduler.running for page in request.pages}
        assert self.engine.stats()["pages_free"] == self.pages - len(used)

    def _end(self, name: str, reason: str) -> None:
        del self.missing[name]
        prompt, tokens = self.prompts.pop(name), self.tokens.pop(name)
        self.reasons[reason] += 1
        number, kinds = int(name), len(SAMPLING)
        if reason == "length" and number % (self.checked * kinds) == kinds - 1:
            self.greedy[name] = prompt, tokens


def check_greedy(model: Model, prompt: list[int], tokens: list[int], bound: float) -> None:
    """Each token is the best after those before it, alone, from an empty cache, without a graph.

    It may have less than the best by `bound` standard deviations: rounding.
    """
    page_size = 8
    pages = -(-(len(prompt) + len(tokens)) // page_size)
    runner = Runner(model, pages * len(tokens), page_size, model.dtype, len(tokens), False)
    chunks = [
        Chunk(prompt + tokens[:n], 0, range(n * pages, (n + 1) * pages), slot=n)
        for n in range(len(tokens))
    ]
    with runner.backend():
        logits = runner.run(chunks)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    assert bool((logits.amax(1) - chosen <= bound * logits.std(1)).all())
