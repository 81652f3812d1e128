"""Measures a decode step of a model that the GPUs of one host divide.

usage: torchrun --nproc-per-node N -m examples.serve.parallel_step [--model-shape llama-70b-cut]

Weights are random, the same on every rank. With ``--nproc-per-node 1``: the step of one GPU, whose
file `--like` compares tokens with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist

from . import decode_step
from .binaries import built_kernel_parts
from .engine import Engine, SamplingParams
from .parallel import join
from .shapes import SHAPES, random_model, shape_config

PAGE_SIZE = 16
TOKENS, PROMPT = 32, 100  # of each request whose tokens are compared


def record_together(run: Callable[[], None]) -> list[decode_step.Span]:
    """What `run` does on this rank's GPU; no rank waits for another's profiler to start."""

    def when_all_record() -> None:
        if dist.is_initialized():
            dist.barrier()
        run()

    return decode_step.record_on_gpu(when_all_record)


def greedy_tokens(engine: Engine, vocab_size: int, count: int) -> list[list[int]]:
    """What follows random prompts, the same ones on every rank and in every run."""
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    tokens: dict[str, list[int]] = {f"compared-{number}": [] for number in range(count)}
    for name in tokens:
        engine.add_request(name, rng.integers(0, vocab_size, size=PROMPT).tolist(), params)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].append(output.token_id)
    return list(tokens.values())


def alike(tokens: list[list[int]], others: list[list[int]]) -> str:
    """How long requests go on with the same tokens: sums round, so near ties may fall otherwise."""
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(tokens, others, strict=True)
    ]
    whole, begins = sum(n == TOKENS for n in same), sum(n > 0 for n in same)
    return (
        f"Of {len(same)} requests {whole} have the same {TOKENS} tokens and {begins} the same "
        f"first one; {np.mean(same):.1f} are the same at first."
    )


@click.command()
@click.option("--model-shape", "shape", default="llama-70b-cut", type=click.Choice(list(SHAPES)))
@click.option("--layers", type=click.IntRange(1), help="Fewer need less memory.")
@click.option("--batch-size", default=16, type=click.IntRange(1), help="Requests of a step.")
@click.option("--context", "contexts", nargs=2, default=(512, 1024), help="Shortest and longest.")
@click.option("--expert-parallel", is_flag=True, help="Ranks have whole experts.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the numbers.")
@click.option("--like", type=click.Path(path_type=Path), help="A file of one GPU's run.")
def main(shape, layers, batch_size, contexts, expert_parallel, path, like) -> None:
    """Build, fill a batch, measure; the first rank prints."""
    if not torch.cuda.is_available():
        raise click.UsageError("parallel_step needs a GPU")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = join(ranks, expert_parallel) if ranks > 1 else None
    config = shape_config(shape, layers)
    model = random_model(config, parallel.device if parallel else "cuda", parallel)
    engine = Engine(
        model, None, num_pages=decode_step.pages_needed(batch_size, contexts, PAGE_SIZE),
        page_size=PAGE_SIZE, max_batch_size=batch_size, use_cuda_graph=True,
    )  # fmt: skip
    engine.build()
    step = decode_step.measure(
        engine, model, batch_size=batch_size, contexts=contexts, record=record_together
    )
    step.parts = built_kernel_parts()
    tokens = greedy_tokens(engine, config.vocab_size, batch_size)
    if parallel is not None:
        everyone: list[list[list[int]]] = [[]] * ranks
        dist.all_gather_object(everyone, tokens)
        if everyone != [tokens] * ranks:
            raise RuntimeError("ranks have chosen different tokens")
    if parallel is None or parallel.rank == 0:
        print(f"{shape}, {config.num_layers} layers, {ranks} GPUs\n{step}", flush=True)
        if path:
            numbers = step.as_json() | {"gpus": ranks, "tokens": tokens}
            path.write_text(json.dumps(numbers, indent=1) + "\n")
        if like:
            print(alike(tokens, json.loads(like.read_text())["tokens"]), flush=True)
    if parallel is not None:
        parallel.close()


if __name__ == "__main__":
    main()
