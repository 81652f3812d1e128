"""An engine without a model: the interface of the serving example, and pages to count."""

from __future__ import annotations

import threading
from collections.abc import Callable

from examples.serve.engine import Output, SamplingParams


class FakeEngine:
    """Every request generates "a", "b", "c", ..., one letter per step.

    Parameters
    ----------
    num_pages, page_size, max_batch_size : int
        As of the engine.
    on_step : callable, optional
        Called in each step, before anything is generated.
    """

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 4,
        max_batch_size: int = 8,
        on_step: Callable[[], None] = lambda: None,
    ):
        self.pages_total = self.pages_free = num_pages
        self.page_size = page_size
        self.max_batch_size = max_batch_size
        self.on_step = on_step
        self.waiting: dict[str, tuple[list[int], SamplingParams]] = {}
        self.running: dict[str, list] = {}  # [tokens so far, max_tokens, pages]
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.compile_seconds = 1.5
        self.threads: set[str] = set()

    def build(self, rows=()) -> None:
        """Nothing is compiled."""

    def _pages(self, prompt: list[int], params: SamplingParams) -> int:
        return -(-(len(prompt) + (params.max_tokens or 99)) // self.page_size)

    def add_request(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        self.threads.add(threading.current_thread().name)
        if self._pages(prompt, params) > self.pages_total:
            raise ValueError(f"prompt: {len(prompt)} tokens and {params.max_tokens} do not fit")
        self.waiting[request_id] = (prompt, params)
        self.seen.append((prompt, params))

    def cancel(self, request_id: str) -> bool:
        self.threads.add(threading.current_thread().name)
        if request_id in self.running:
            self.pages_free += self.running.pop(request_id)[2]
            return True
        return self.waiting.pop(request_id, None) is not None

    def step(self) -> list[Output]:
        self.threads.add(threading.current_thread().name)
        self.on_step()
        for request_id, (prompt, params) in list(self.waiting.items()):
            pages = self._pages(prompt, params)
            if pages <= self.pages_free and len(self.running) < self.max_batch_size:
                del self.waiting[request_id]
                self.pages_free -= pages
                self.running[request_id] = [0, params.max_tokens or 99, pages]
        outputs = []
        for request_id, state in list(self.running.items()):
            token = state[0]
            state[0] += 1
            finished = state[0] == state[1]
            reason = "length" if finished else None
            outputs.append(Output(request_id, token, chr(97 + token % 26), finished, reason))
            if finished:
                self.pages_free += self.running.pop(request_id)[2]
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def stats(self) -> dict:
        return {
            "pages_total": self.pages_total,
            "pages_free": self.pages_free,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "compile_seconds": self.compile_seconds,
            "cached_tokens": 0,
            "drafted_tokens": 0,
            "accepted_tokens": 0,
        }
