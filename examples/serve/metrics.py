"""What Prometheus can read of a server: queue, pages, tokens, and how long clients wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE_LATEST

from .engine import Output

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_GAUGES = {
    "requests_running": ("running", "Requests of which tokens are computed."),
    "requests_waiting": ("waiting", "Requests that wait for their first step."),
    "kv_cache_pages": ("pages_total", "Pages of the KV cache."),
    "kv_cache_pages_free": ("pages_free", "Pages that no request has, cached prefixes included."),
}
_TOTALS = {
    "prefix_cache_tokens": ("cached_tokens", "Tokens of prompts found in the cache."),
    "speculation_drafted_tokens": ("drafted_tokens", "Tokens that were guessed."),
    "speculation_accepted_tokens": ("accepted_tokens", "Guesses that were right."),
}


class Metrics:
    """Counts of one server; names begin with ``flashinfer_serve_``."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def options(name: str, text: str) -> dict[str, Any]:
            return {
                "name": f"flashinfer_serve_{name}", "documentation": text,
                "registry": self._registry,
            }  # fmt: skip

        self._gauges = {key: Gauge(**options(name, text)) for name, (key, text) in _GAUGES.items()}
        self._totals = {
            key: Counter(**options(name, text)) for name, (key, text) in _TOTALS.items()
        }
        self._read = dict.fromkeys(self._totals, 0)
        self._prompt = Counter(**options("prompt_tokens", "Tokens of prompts."))
        self._generated = Counter(**options("generation_tokens", "Tokens that were generated."))
        self._ended = Counter(
            **options("requests", "Answers that ended, by the reason."), labelnames=["reason"]
        )
        self._first = Histogram(
            **options("time_to_first_token_seconds", "From a request to its first token."),
            buckets=_SECONDS,
        )
        self._between = Histogram(
            **options("inter_token_latency_seconds", "From a token of a request to the next."),
            buckets=_SECONDS,
        )

    def watch(self, prompt_tokens: int) -> Callable[[Output | Exception], None]:
        """For a request that begins now: what to call with each of its outputs, by one thread."""
        last = time.monotonic()
        begun = False

        def listen(output: Output | Exception) -> None:
            nonlocal last, begun
            if isinstance(output, Exception):
                return
            now = time.monotonic()
            if not begun:
                self._prompt.inc(prompt_tokens)
            (self._between if begun else self._first).observe(now - last)
            last, begun = now, True
            self._generated.inc()

        return listen

    def ended(self, reason: str) -> None:
        """An answer ended: by "stop", by its "length", or "cancelled" before that."""
        self._ended.labels(reason).inc()

    def text(self, stats: Mapping[str, Any]) -> bytes:
        """All of it in Prometheus's text format; `stats`: those of the engine."""
        for key, gauge in self._gauges.items():
            gauge.set(stats[key])
        for key, counter in self._totals.items():
            counter.inc(stats[key] - self._read[key])
            self._read[key] = stats[key]
        return generate_latest(self._registry)
