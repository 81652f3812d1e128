"""Compiles what requests may need before there are any: calls of every layer, in parallel.

A package compiles a kernel at its first call, or at the plan for it, and the calls of a step follow
each other. So batches of every shape that selects a kernel are planned by a thread each, and each
part of each kind of layer is called by another one, on tensors of its own; threads that need the
same kernel wait for the first of them. There are about as many as cores, and what the first token
of a prompt needs comes first, before what decoding, other prompts and sampling need. This takes
public names alone, and holds for every model.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .invariance import round_up, tile_rows
from .layers.body import LaterBatch
from .layers.linear import FEW
from .model import Model
from .runner import Chunk, Runner
from .sampling import SamplingParams, steps

# Values that select a kernel: the rows of attention (tokens times heads per KV head: powers of two
# meet every tile, of up to 32 heads) and the filters of a batch.
PROMPTS = (2, 4, 8, 16, 32, 64, 128, 1000)
SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.1, max_tokens=2),
    SamplingParams(max_tokens=2),
    SamplingParams(top_k=20, top_p=0.9, max_tokens=2),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.1, max_tokens=2),
)
# Rows of a step that select a kernel of products, beside single ones: of a short and a long prompt,
# of a few requests that decode, and those between, which the first token does without.
FIRST_ROWS = (128, 1000, FEW)
ROWS = (16, 32, 64, *FIRST_ROWS)
_FEWEST_THREADS = 8  # some wait for a kernel that another one compiles
_WORKSPACE_BYTES = 32 << 20


@dataclass(frozen=True)
class Compilation:
    """Calls under way.

    Attributes
    ----------
    prompt : list of Future
        The first token of a prompt needs all of these.
    rest : list of Future
        The others.
    """

    prompt: list[Future[Any]]
    rest: list[Future[Any]]

    def wait_for_prompt(self) -> None:
        """Until a prompt's first token needs nothing more, for most prompts."""
        for future in self.prompt:
            future.result()

    def wait(self) -> None:
        """Until everything is compiled; raises what a call raised."""
        for future in (*self.prompt, *self.rest):
            future.result()

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in (*self.prompt, *self.rest))


def compile_all(
    model: Model,
    page_size: int,
    kv_dtype: torch.dtype,
    batch_invariant: bool,
    rows: Sequence[int] = FIRST_ROWS,
) -> Compilation:
    """Begin to call everything once, on tensors of its own.

    Parameters
    ----------
    model : Model
        The model that will be served.
    page_size : int
        Tokens of a page.
    kv_dtype : torch.dtype
        Type of the cache.
    batch_invariant : bool
        As of the engine.
    rows : sequence of int
        How many rows products get, beside single ones.
    """
    longest = min(max(PROMPTS), model.config.max_positions)
    usual = min(FIRST_ROWS[0], longest)
    pages = -(-longest // page_size)
    tile = tile_rows(model.device) if batch_invariant else None

    def runner(backend: str = "auto") -> Runner:
        return Runner(
            model, pages, page_size, kv_dtype, 2, False, batch_invariant, _WORKSPACE_BYTES, backend
        )

    def start(call: Callable[[], Any]) -> Future[Any]:
        def run() -> Any:
            with first.backend(), torch.no_grad():  # both hold in their own thread alone
                return call()

        return pool.submit(run)

    def attend(spec: Any, lengths: tuple[int, ...]) -> None:
        own = runner()
        batch = own.prepare(_chunks(lengths, pages), [spec])
        for found, parts in _kinds(own, len(batch.tokens), lambda: batch):
            if found == spec:
                parts[-1]()

    def plan_for_hopper(spec: Any) -> None:
        """The kernel of long prompts, compiled before the planner that chooses it is there."""
        with contextlib.suppress(ValueError):  # it does not run here, or not this attention
            runner("fa3").prepare(_chunks((usual,), pages), [spec])

    def calls(count: int) -> Iterator[Callable[[], Any]]:
        """All parts but attention, for so many rows."""
        # Nothing of the batch is waited for here.
        batch = start(partial(first.prepare, _chunks((count,), pages), [])).result
        kinds = _kinds(first, round_up(count, tile), batch)
        for spec, parts in sorted(kinds, key=lambda kind: kind[0] is not None):
            yield from parts if spec is None else parts[:-1]

    first = runner()
    pool = ThreadPoolExecutor(max(_FEWEST_THREADS, len(os.sched_getaffinity(0))))
    shape = 1, model.config.vocab_size
    best, *draws = steps(torch.zeros(shape, dtype=model.logits_dtype, device=model.device))
    # What takes longest comes first: threads that wait for others fill the pool.
    guesses = [] if model.device.type != "cuda" else [
        start(partial(plan_for_hopper, spec)) for spec in model.specs
    ]  # fmt: skip
    prompt = [start(best), *(start(partial(attend, spec, (usual,))) for spec in model.specs)]
    prompt += [start(call) for call in (*calls(usual), *_norms(model))]
    rest = guesses + [
        start(partial(attend, spec, lengths))
        for lengths in _batches(longest)
        if lengths != (usual,)
        for spec in model.specs
    ]
    for count in sorted({1, *(n for n in rows if n <= longest)} - {usual}, reverse=True):
        rest += [start(call) for call in calls(count)]
    rest += [start(call) for call in draws]
    pool.shutdown(wait=False)
    return Compilation(prompt, rest)


def _batches(longest: int) -> Iterator[tuple[int, ...]]:
    """New tokens of each request."""
    yield (1,)
    yield from ((length,) for length in reversed(PROMPTS) if length <= longest)
    yield (2, 1)  # a short prompt beside a request that decodes


def _chunks(lengths: tuple[int, ...], pages: int) -> list[Chunk]:
    # They may share pages: nobody reads the results.
    return [Chunk([0] * n, 0, range(pages), slot=slot) for slot, n in enumerate(lengths)]


def _kinds(
    runner: Runner, rows: int, batch: LaterBatch
) -> list[tuple[Any, list[Callable[[], Any]]]]:
    """The plan of each kind of layer, and its parts for so many rows."""
    model = runner.model
    x = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=model.device)
    found = {}
    for block, cache in zip(model.blocks, runner.caches, strict=True):
        kind = type(block.body), block.body.spec
        if kind not in found:
            found[kind] = block.body.spec, block.body.parts(x, batch, cache)
    return list(found.values())


def _norms(model: Model) -> Iterator[Callable[[], Any]]:
    x = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=model.device)
    yield lambda: model.norm(x)
    yield lambda: model.norm.add(x.clone(), x.clone())
    if model.rounds:
        yield lambda: model.norm.add_rounded(x.clone(), x.clone())
