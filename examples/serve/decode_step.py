"""Measures a decode step: how long it takes, what the memory would allow, where the time goes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from .engine import Engine, SamplingParams
from .layers.attention import Rope
from .layers.linear import Product, Sum, takes_sums
from .layers.mixture import Mixture, Router
from .model import Model

MEMORY_TB_PER_S = 4.3  # what one H200 reads

ATTENTION, GEMM, LAYER = "attention", "matrix products", "norm, activation, RoPE, append"
ROUTING, RECURRENCE = "routing of experts", "recurrent layers"
COMMUNICATION = "sums over GPUs, with norm"
SAMPLING, OTHER, GAPS = "sampling", "other kernels and copies", "between kernels"
HOST = "host (the GPU waits)"
_GEMM_NAMES = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma", re.IGNORECASE)
# Kernels of one graph follow each other within a few microseconds; a host takes longer.
_LONGEST_GAP = 20.0

GREEDY = SamplingParams(temperature=0.0)
SETTLE, STEPS, RECORDED = 5, 40, 5
# More tokens than a request generates here, some of them while the prompts of others are read.
GENERATED = 256
# About as many as that, for the longest context not to exceed what is asked for.
_FEWER = 64


@dataclass(frozen=True)
class Span:
    """A kernel or copy on the GPU, from `start` to `end` microseconds."""

    name: str
    start: float
    end: float


@dataclass
class DecodeStep:
    """A measurement.

    Attributes
    ----------
    milliseconds : list of float
        Time of each step, from one batch of tokens on the host to the next. The host prepares a
        step while the GPU computes the one before.
    contexts : list of int
        Keys of each request, in the middle of the measurement.
    weight_bytes, kv_bytes : int
        What a step must read: weights, and keys and values or the states of recurrent layers.
    spans : list of Span
        Kernels that ran in `RECORDED` further steps; empty if they could not be recorded.
    parts : mapping
        Part of each kernel of ours, by its name.
    """

    milliseconds: list[float]
    contexts: list[int]
    weight_bytes: int
    kv_bytes: int
    spans: list[Span]
    parts: Mapping[str, str]

    @property
    def step_ms(self) -> float:
        return float(np.median(self.milliseconds))

    @property
    def floor_ms(self) -> float:
        return _floor_ms(self.weight_bytes + self.kv_bytes)

    def shares(self) -> dict[str, float]:
        """Milliseconds of each part in a step; what no kernel accounts for is the host's."""
        if not self.spans:
            return {}
        busy = busy_time(self.spans, self.parts)
        times = {part: 1e-3 * us / RECORDED for part, us in busy.items()}
        # Not from the recorded steps, whose host is slower.
        return times | {HOST: max(0.0, self.step_ms - sum(times.values()))}

    def as_json(self) -> dict[str, Any]:
        """Numbers for a file; of the kernels, milliseconds in a step by name."""
        kernels: dict[str, float] = {}
        for span in self.spans:
            ms = 1e-3 * (span.end - span.start) / RECORDED
            kernels[span.name] = kernels.get(span.name, 0.0) + ms
        return {
            "step_ms": self.step_ms,
            "step_p99_ms": float(np.percentile(self.milliseconds, 99)),
            "floor_ms": self.floor_ms,
            "ratio": self.step_ms / self.floor_ms,
            "batch_size": len(self.contexts),
            "contexts": self.contexts,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "shares_ms": self.shares(),
            "kernels": [
                {"name": name, "part": part_of(name, self.parts), "ms": ms}
                for name, ms in sorted(kernels.items(), key=lambda item: -item[1])
            ],
            "milliseconds": self.milliseconds,
        }

    def __str__(self) -> str:
        contexts = self.contexts
        lines = [
            f"Decode step of {len(contexts)} requests with {min(contexts):,} to "
            f"{max(contexts):,} tokens: {self.step_ms:.2f} ms (median of {len(self.milliseconds)}, "
            f"p99 {np.percentile(self.milliseconds, 99):.2f}),",
            f"{self.step_ms / self.floor_ms:.3f} times the {self.floor_ms:.2f} ms of reading "
            f"{self.weight_bytes / 1e9:.1f} GB of weights and {self.kv_bytes / 1e9:.1f} GB of keys "
            f"and values once, at {MEMORY_TB_PER_S} TB/s.",
        ]
        shares = self.shares()
        if not shares:
            return "\n".join([*lines, "No shares: the profiler recorded no kernel."])
        floors = {ATTENTION: _floor_ms(self.kv_bytes), GEMM: _floor_ms(self.weight_bytes)}
        rows = [
            (part, f"{ms:.3f}", f"{100 * ms / self.step_ms:.1f} %", f"{floor:.2f}" if floor else "")
            for part, ms in shares.items()
            if ms
            for floor in (floors.get(part),)
        ]
        rows.append(("step", f"{self.step_ms:.3f}", "", f"{self.floor_ms:.2f}"))
        headers = ["part", "ms", "share", "floor ms"]
        return "\n".join([*lines, "", tabulate(rows, headers, disable_numparse=True)])


def _floor_ms(nbytes: int) -> float:
    return nbytes / MEMORY_TB_PER_S / 1e9


def part_of(name: str, parts: Mapping[str, str]) -> str:
    """Part of a kernel or copy by its demangled name."""
    if "flashinfer::" in name:
        return next((parts[word] for word in re.findall(r"\w+", name) if word in parts), OTHER)
    return GEMM if _GEMM_NAMES.search(name) else OTHER


def busy_time(spans: Sequence[Span], parts: Mapping[str, str]) -> dict[str, float]:
    """Microseconds of each part; what overlaps counts once, for the kernel that began first."""
    parts_of_a_step = (
        *(ATTENTION, RECURRENCE, GEMM, ROUTING, LAYER, COMMUNICATION, SAMPLING, OTHER),
        GAPS,
    )
    times = dict.fromkeys(parts_of_a_step, 0.0)
    ordered = sorted(spans, key=lambda span: span.start)
    until = ordered[0].start if ordered else 0.0
    for span in ordered:
        if 0 < span.start - until < _LONGEST_GAP:
            times[GAPS] += span.start - until
        times[part_of(span.name, parts)] += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return times


def record_on_gpu(run: Callable[[], None]) -> list[Span]:
    """What `run` does on the GPU, by PyTorch's profiler."""
    torch.cuda.synchronize()  # a step that was launched ahead: as many are launched in `run`
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return read_trace(path.read_text(errors="replace"))


def read_trace(text: str) -> list[Span]:
    """Kernels, copies and fills of a trace in Chrome's format."""
    return [
        Span(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in json.loads(text, strict=False)["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event
    ]


def bytes_per_token(model: Model, kv_dtype: torch.dtype) -> int:
    """Bytes that one token leaves in the caches of all layers."""
    return sum(math.prod(shape) for shape in model.page_shapes(1)) * kv_dtype.itemsize


def state_bytes(model: Model) -> int:
    """Bytes of the states of one request in all recurrent layers."""
    states = [block.body.new_state(1, model.device) or () for block in model.blocks]
    return sum(tensor.nbytes for state in states for tensor in state)


class NotedGate:
    """A router's product that remembers its last logits, for each number of rows.

    What a captured graph computes lies where it did when the graph was captured: the tensor that is
    kept is written again by each replay.
    """

    def __init__(self, gate: Product) -> None:
        self.gate, self.inputs = gate, gate.inputs
        self.last: dict[int, torch.Tensor] = {}

    @property
    def takes_sums(self) -> bool:
        return takes_sums(self.gate)

    def __call__(self, x: torch.Tensor | Sum) -> torch.Tensor:
        self.last[len(x)] = logits = self.gate(x)
        return logits

    @property
    def routes(self) -> bool:
        return getattr(self.gate, "routes", False)

    def route(self, x: Sum, chosen: int, renormalize: bool) -> tuple[torch.Tensor, ...]:
        weights, numbers, logits = self.gate.route(x, chosen, renormalize)
        self.last[len(x)] = logits
        return weights, numbers, logits


def note_routes(model: Model) -> None:
    """Let `weight_bytes` count the experts that a step really chose; before a graph is captured."""
    for mixture in _mixtures(model):
        mixture.router.gate = NotedGate(mixture.router.gate)


def _mixtures(model: Model) -> list[Mixture]:
    return [block.body for block in model.blocks if isinstance(block.body, Mixture)]


def _missed(router: Router, count: int, rows: int) -> float:
    """The share of `count` experts that no token of a step chooses."""
    last = router.gate.last if isinstance(router.gate, NotedGate) else {}
    sizes = [size for size in last if size >= rows]  # a graph may have more rows
    if not sizes:
        return (1 - router.chosen / count) ** rows
    _, experts = router.choose(last[min(sizes)][:rows])
    return 1 - len(experts.unique()) / count


def weight_bytes(model: Model, rows: int | None = None) -> int:
    """Weights that a step reads: not the embedding, of which it takes a row per token.

    Of the experts of a mixture `rows` tokens choose a part: as `note_routes` saw it, else as if all
    experts were as likely; None: all.
    """
    total = sum(
        tensor.nbytes for tensor in (*_tensors(model.blocks), model.norm.weight, model.head)
    )
    for mixture in _mixtures(model) if rows is not None else ():
        missed = _missed(mixture.router, len(mixture.experts.up), rows)
        total -= round(missed * sum(tensor.nbytes for tensor in _tensors(mixture.experts)))
    return total


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    """Weights of layers, whatever these are made of; cosines and sines are none."""
    if isinstance(part, torch.Tensor):
        yield part
        return
    if isinstance(part, NotedGate):
        part = part.gate
    items: Iterable[Any] = ()
    if isinstance(part, list | tuple):
        items = part
    elif isinstance(part, dict):
        items = part.values()
    elif type(part).__module__.startswith(f"{__package__}.") and not isinstance(part, Rope):
        items = vars(part).values()
    for item in items:
        yield from _tensors(item)


def measure(
    engine: Engine,
    model: Model,
    parts: Mapping[str, str] = MappingProxyType({}),
    *,
    batch_size: int = 64,
    contexts: tuple[int, int] = (2048, 4096),
    sampling: SamplingParams = GREEDY,
    record: Callable[[Callable[[], None]], list[Span]] = record_on_gpu,
) -> DecodeStep:
    """Serve a batch of random prompts until all decode; time steps, then record some.

    Parameters
    ----------
    engine : Engine
        Without work, with a cache of the model's dtype and room for the batch: see `pages_needed`.
    model : Model
        The engine's.
    parts : mapping
        Result of `binaries.kernel_parts`; it may be set in the result, which shares alone need.
    batch_size : int
        Requests, at most the engine's batch.
    contexts : tuple of int
        Shortest and longest context; the requests lie evenly between.
    sampling : SamplingParams
        How tokens are drawn.
    record : callable
        Runs what it is given and returns what the GPU did.

    Returns
    -------
    DecodeStep

    Raises
    ------
    ValueError
        If the contexts are too short or the engine has too few pages.
    """
    lengths = _prompt_lengths(batch_size, contexts)
    needed = pages_needed(batch_size, contexts, engine.page_size)
    if needed > engine.stats()["pages_free"]:
        free = engine.stats()["pages_free"]
        raise ValueError(f"`engine` must have {needed} free pages, got {free}")
    rng = np.random.default_rng(0)
    params = dataclasses.replace(sampling, max_tokens=GENERATED, ignore_eos=True)
    generated: dict[str, int] = {}
    for number, length in enumerate(lengths):
        prompt = rng.integers(0, model.config.vocab_size, size=length).tolist()
        generated[f"decode-{number}"] = 0
        engine.add_request(f"decode-{number}", prompt, params)

    def step() -> int:
        outputs = engine.step()
        for output in outputs:
            generated[output.request_id] += 1
        return len(outputs)

    def more_steps() -> None:
        for _ in range(RECORDED):
            step()

    try:
        while min(generated.values()) == 0:
            step()
        for _ in range(SETTLE):  # the first captures the graph
            step()
        milliseconds = []
        for number in range(STEPS):
            if number == STEPS // 2:
                tokens = [n + g for n, g in zip(lengths, generated.values(), strict=True)]
            start = time.perf_counter()  # the tokens of the step before have just arrived
            count = step()
            milliseconds.append(1e3 * (time.perf_counter() - start))
            assert count == batch_size, f"{count} of {batch_size} requests decoded"
        spans = record(more_steps)
    finally:
        for name in generated:
            engine.cancel(name)
    kv_bytes = sum(tokens) * bytes_per_token(model, engine.cache.dtype)
    kv_bytes += batch_size * state_bytes(model)
    weights = weight_bytes(model, batch_size)
    return DecodeStep(milliseconds, tokens, weights, kv_bytes, spans, parts)


def _prompt_lengths(batch_size: int, contexts: tuple[int, int]) -> list[int]:
    low, high = contexts
    high -= _FEWER
    if not 1 <= low <= high:
        raise ValueError(f"`contexts` must be two lengths, {_FEWER} apart or more, got {contexts}")
    return np.linspace(low, high, batch_size).round().astype(int).tolist()


def pages_needed(batch_size: int, contexts: tuple[int, int], page_size: int) -> int:
    """Pages of the cache that `measure` needs."""
    lengths = _prompt_lengths(batch_size, contexts)
    return sum(-(-(length + GENERATED) // page_size) for length in lengths)
