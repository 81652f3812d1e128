"""Measures a decode step of a model that the GPUs of one host divide.

usage: torchrun --nproc-per-node N -m examples.serve.parallel_step [--model-shape llama-70b-cut]

Weights are random, the same on every rank. With ``--nproc-per-node 1``: the step of one GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.distributed as dist

from . import decode_step
from .binaries import built_kernel_parts
from .engine import Engine
from .parallel import join
from .shapes import SHAPES, random_model, shape_config

PAGE_SIZE = 16


def record_together(run: Callable[[], None]) -> list[decode_step.Span]:
    """What `run` does on this rank's GPU; no rank waits for another's profiler to start."""

    def when_all_record() -> None:
        if dist.is_initialized():
            dist.barrier()
        run()

    return decode_step.record_on_gpu(when_all_record)


@click.command()
@click.option("--model-shape", "shape", default="llama-70b-cut", type=click.Choice(list(SHAPES)))
@click.option("--layers", type=click.IntRange(1), help="Fewer need less memory.")
@click.option("--batch-size", default=16, type=click.IntRange(1), help="Requests of a step.")
@click.option("--context", "contexts", nargs=2, default=(512, 1024), help="Shortest and longest.")
@click.option("--expert-parallel", is_flag=True, help="Ranks have whole experts.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the numbers.")
def main(shape, layers, batch_size, contexts, expert_parallel, path) -> None:
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
    if parallel is None or parallel.rank == 0:
        print(f"{shape}, {config.num_layers} layers, {ranks} GPUs\n{step}", flush=True)
        if path:
            path.write_text(json.dumps(step.as_json() | {"gpus": ranks}, indent=1) + "\n")
    if parallel is not None:
        parallel.close()


if __name__ == "__main__":
    main()
