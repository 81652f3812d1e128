"""Makes an engine compile, load and capture what its requests will need, before there are any."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from .ahead import PROMPTS, ROWS, SAMPLING
from .engine import Engine, SamplingParams


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
    engine.build(ROWS)  # in parallel; what is called first would be compiled one after the other
    for params in SAMPLING:
        _serve(engine, [[0]], params)
    for token, length in enumerate(PROMPTS, start=1):
        # Each of a token of its own: what a prompt shares with an earlier one is not computed.
        _serve(engine, [[token] * length], SAMPLING[0])
    size = 1
    while size < max_batch_size:
        size = min(2 * size, max_batch_size)
        _serve(engine, [[0]] * size, SAMPLING[0])
    return engine.stats()["compile_seconds"] - before


def _serve(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    for number, prompt in enumerate(prompts):
        # A prompt that this engine would refuse needs no warm-up.
        with contextlib.suppress(ValueError):
            engine.add_request(f"warm-up-{number}", prompt, params)
    while engine.has_work:
        engine.step()
