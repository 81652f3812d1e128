"""Makes an engine compile, load and capture what its requests will need, before there are any."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from .engine import Engine, SamplingParams

# What selects a kernel: the rows of attention (tokens times heads per KV head: powers of two meet
# every tile, of up to 32 heads) and the filters of a batch.
PROMPTS = (2, 4, 8, 16, 32, 64, 128, 1000)
_SAMPLING = (
    SamplingParams(temperature=0.0, max_tokens=2),
    SamplingParams(max_tokens=2),
    SamplingParams(top_k=20, top_p=0.9, max_tokens=2),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.1, max_tokens=2),
)


def warm_up(engine: Engine, max_batch_size: int) -> float:
    """Build, then serve requests of every kind, then batches of every size that graphs are for.

    Parameters
    ----------
    engine : Engine
        Without work.
    max_batch_size : int
        The engine's.

    Returns
    -------
    float
        Seconds of compilation.
    """
    before = engine.stats()["compile_seconds"]
    engine.build()  # in parallel; what is called first would be compiled one after the other
    for params in _SAMPLING:
        _serve(engine, [[0]], params)
    for token, length in enumerate(PROMPTS, start=1):
        # Each of a token of its own: what a prompt shares with an earlier one is not computed.
        _serve(engine, [[token] * length], _SAMPLING[0])
    size = 1
    while size < max_batch_size:
        size = min(2 * size, max_batch_size)
        _serve(engine, [[0]] * size, _SAMPLING[0])
    return engine.stats()["compile_seconds"] - before


def _serve(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    for number, prompt in enumerate(prompts):
        # A prompt that this engine would refuse needs no warm-up.
        with contextlib.suppress(ValueError):
            engine.add_request(f"warm-up-{number}", prompt, params)
    while engine.has_work:
        engine.step()
