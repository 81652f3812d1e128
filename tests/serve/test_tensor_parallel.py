"""Models divided among GPUs, beside the same ones on one; without a GPU see
`test_parallel_families`."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from examples.serve.engine import Engine, SamplingParams, load
from examples.serve.parallel import TensorParallel, join
from tests.comm.ranks import needs_two_gpus
from tests.serve.models import write

PROMPTS = [f"the {word} of a small model of random weights" for word in "abcdefghijklmnop"]
TOKENS = 12
RANKS = [n for n in (2, 4, 8) if n <= max(torch.cuda.device_count(), 2)]
# Norms after the sum (Gemma), beside it (Qwen3-Next), whole experts, latent attention.
FAMILIES = (("gemma2", False), ("qwen3_next", True), ("deepseek_v3", False))
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "num_experts": 8,
}


def generate(folder: Path | None, device: str, parallel: TensorParallel | None) -> list[str]:
    """Greedy continuations of all prompts, the decode steps from a captured graph."""
    model, tokenizer = load(folder, device, torch.bfloat16, parallel)
    engine = Engine(model, tokenizer, num_pages=256, use_cuda_graph=True)
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        engine.add_request(str(number), prompt, params)
    texts = [""] * len(PROMPTS)
    while engine.has_work:
        for output in engine.step():
            texts[int(output.request_id)] += output.text
    return texts


def compare(rank: int, ranks: int, port: int, folder: Path | None, experts: bool) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks)
    )
    os.environ.update(LOCAL_RANK=str(rank), FLASHINFER_COMM_TIMEOUT="60")
    parallel = join(ranks, experts)
    divided = generate(folder, parallel.device, parallel)
    everyone: list[list[str]] = [[]] * ranks
    dist.all_gather_object(everyone, divided)
    assert everyone == everyone[:1] * ranks
    alone = generate(folder, parallel.device, None)
    # Partial sums round once more, so that near ties may fall differently.
    same = sum(a == b for a, b in zip(divided, alone, strict=True))
    begins = sum(a[:1] == b[:1] for a, b in zip(divided, alone, strict=True))
    if rank == 0:
        print(f"{same} of {len(alone)} texts are the same, {begins} begin alike", flush=True)
    assert begins >= 0.8 * len(alone)
    parallel.close()
    dist.destroy_process_group()


def on_gpus(ranks: int, folder: Path | None, experts: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(compare, (ranks, port, folder, experts), nprocs=ranks)


@needs_two_gpus
@pytest.mark.parametrize("ranks", RANKS[:2])  # its model has four heads
def test_gpus_generate_what_one_does(ranks: int):
    on_gpus(ranks, None, False)


@needs_two_gpus
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name, experts", FAMILIES)
def test_gpus_generate_what_one_does_of_a_family(
    tmp_path: Path, name: str, experts: bool, ranks: int
):
    on_gpus(ranks, write(tmp_path, name, **WIDE), experts)


def test_a_wrong_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="--tensor-parallel 2 needs 2 processes, got 1"):
        join(2)
