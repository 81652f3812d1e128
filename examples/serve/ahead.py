"""Compiles what requests may need before there are any: calls of every layer, in parallel.

A package compiles a kernel at its first call, or at the plan for it, and the calls of a step follow
each other. So batches of every shape that selects a kernel are planned by a thread each, and each
part of each kind of layer is called by another one, on tensors of its own; threads that need the
same kernel wait for the first of them. Attention begins first, then mixtures and products, which
compile longer than the rest. This takes public names alone, and holds for every model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import torch

from .invariance import round_up, tile_rows
from .layers.body import LaterBatch
from .model import Model
from .runner import Chunk, Runner
from .sampling import SamplingParams, steps

# Values that select a kernel: the rows of attention (tokens times heads per KV head: powers of two
# meet every tile, of up to 32 heads) and the filters of a batch.
PROMPTS = (2, 4, 8, 16, 32, 64, 128, 1000)
SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=2),
    SamplingParams(max_tokens=2),
    SamplingParams(top_k=20, top_p=0.9, max_tokens=2),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.1, max_tokens=2),
)
# Rows of a step that select a kernel of products, beside single ones: of a short and a long prompt,
# and those between, which the first token does without.
FIRST_ROWS = (128, 1000)
ROWS = (16, 32, 64, *FIRST_ROWS)
_THREADS = 32  # they wait for compilers
_WORKSPACE_BYTES = 32 << 20


def compile_all(
    model: Model,
    page_size: int,
    kv_dtype: torch.dtype,
    batch_invariant: bool,
    rows: Sequence[int] = FIRST_ROWS,
) -> None:
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
    rows : sequence of int
        How many rows products get, beside single ones.
    """
    longest = min(max(PROMPTS), model.config.max_positions)
    pages = -(-longest // page_size)
    tile = tile_rows(model.device) if batch_invariant else None

    def runner() -> Runner:
        return Runner(
            model, pages, page_size, kv_dtype, 2, False, batch_invariant, _WORKSPACE_BYTES
        )

    def run(call: Callable[[], Any]) -> Any:
        with first.backend(), torch.no_grad():  # both hold in their own thread alone
            return call()

    def attend(lengths: tuple[int, ...]) -> list[Callable[[], Any]]:
        """Plans, then gives attention of each kind of layer that has a plan."""
        own = runner()
        batch = own.prepare(_chunks(lengths, pages))
        kinds = _kinds(own, len(batch.tokens), lambda: batch)
        return [parts[-1] for spec, parts in kinds if spec is not None]

    def start(call: Callable[[], Any]) -> Future[Any]:
        return pool.submit(run, call)

    first = runner()
    with ThreadPoolExecutor(_THREADS) as pool:
        plans = [start(partial(attend, lengths)) for lengths in _batches(longest)]
        calls: list[Callable[[], Any]] = []
        for count in sorted({1, *(n for n in rows if n <= longest)}, reverse=True):
            # Nothing of the batch is waited for here.
            batch = start(partial(first.prepare, _chunks((count,), pages), plans=False)).result
            kinds = _kinds(first, round_up(count, tile), batch)
            for spec, parts in sorted(kinds, key=lambda kind: kind[0] is not None):
                calls += parts if spec is None else parts[:-1]
        calls += _norms(model)
        calls += steps(torch.zeros(1, model.config.vocab_size, device=model.device))
        started = [start(call) for call in calls]
        for planned in as_completed(plans):
            started += [start(call) for call in planned.result()]
        for future in started:
            future.result()


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
