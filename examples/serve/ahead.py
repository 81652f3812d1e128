"""Compiles what requests may need before there are any: calls of every layer, in parallel.

A package compiles a kernel at its first call, or at the plan for it, and the calls of a step follow
each other. So batches of every shape that selects a kernel are planned by a thread each, and each
part of each kind of layer is called by another one; threads that need the same kernel wait for the
first of them. This takes public names alone, and holds for every model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from .model import Model
from .runner import Chunk, Runner
from .sampling import SamplingParams, sample

# Values that select a kernel: the rows of attention (tokens times heads per KV head: powers of two
# meet every tile, of up to 32 heads) and the filters of a batch.
PROMPTS = (2, 4, 8, 16, 32, 64, 128, 1000)
SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=2),
    SamplingParams(max_tokens=2),
    SamplingParams(top_k=20, top_p=0.9, max_tokens=2),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.1, max_tokens=2),
)
_THREADS = 16
_WORKSPACE_BYTES = 32 << 20


def compile_all(model: Model, page_size: int, kv_dtype: torch.dtype, batch_invariant: bool) -> None:
    """Call everything once, on tensors of its own.

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
    """
    longest = min(max(PROMPTS), model.config.max_positions)
    pages = -(-longest // page_size)

    def runner() -> Runner:
        return Runner(
            model, pages, page_size, kv_dtype, 2, False, batch_invariant, _WORKSPACE_BYTES
        )

    def run(call: Callable[[], Any]) -> Any:
        with first.backend(), torch.no_grad():  # both hold in their own thread alone
            return call()

    def plan(number: int, lengths: tuple[int, ...]) -> list[Callable[[], Any]]:
        return list(_layers(model, runner(), lengths, only_attention=number > 1))

    first = runner()
    with ThreadPoolExecutor(_THREADS) as pool:
        plans = [
            pool.submit(run, functools.partial(plan, number, lengths))
            for number, lengths in enumerate(_batches(longest))
        ]
        started = [pool.submit(run, call) for call in _sampling(model)]
        for planned in as_completed(plans):
            started += [pool.submit(run, call) for call in planned.result()]
        for future in started:
            future.result()


def _batches(longest: int) -> Iterator[tuple[int, ...]]:
    """New tokens of each request."""
    yield (1,)
    yield (2, 1)  # a short prompt beside a request that decodes
    yield from ((length,) for length in PROMPTS if length <= longest)


def _layers(
    model: Model, runner: Runner, lengths: tuple[int, ...], only_attention: bool
) -> Iterator[Callable[[], Any]]:
    """The parts of each kind of layer, and the norms."""
    pages = range(runner.num_pages)
    # They may share pages: nobody reads the results.
    chunks = [Chunk([0] * n, 0, pages, slot=slot) for slot, n in enumerate(lengths)]
    batch = runner.prepare(chunks)
    x = torch.zeros(
        len(batch.tokens), model.config.hidden_size, dtype=model.dtype, device=model.device
    )
    if not only_attention:
        yield lambda: model.norm(x)
        yield lambda: model.norm.add(x.clone(), x.clone())
    seen = set()
    for block, cache in zip(model.blocks, runner.caches, strict=True):
        kind = (type(block.body), block.body.spec)
        if kind not in seen:
            seen.add(kind)
            parts = block.body.parts(x, batch, cache)
            if not only_attention:
                yield from parts
            elif block.body.spec is not None:
                yield parts[-1]


def _sampling(model: Model) -> Iterator[Callable[[], Any]]:
    logits = torch.zeros(1, model.config.vocab_size, device=model.device)
    for params in SAMPLING:
        yield lambda params=params: sample(logits, [params], [0], [0])
