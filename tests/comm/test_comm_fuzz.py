"""Random calls of random sizes, with random delays between the ranks."""

from __future__ import annotations

import random
import time

import torch

from flashinfer import comm
from tests.comm.ranks import needs_gpu, run_ranks
from tests.comm.test_all_reduce import PLAIN, close, open_workspace

pytestmark = needs_gpu
IN_A_CHILD = True
SECONDS, FULL_SECONDS = 2.0, 60.0


ROWS, HIDDEN, BATCH = 64, 2048, 50


def fuzz(backend, seconds: float) -> tuple[int, int]:
    """Calls made and wrong elements. All ranks draw the same numbers but the delays."""
    world_size, rank = backend.Get_size(), backend.Get_rank()
    shared, own = random.Random(5), random.Random(rank)
    inputs = [torch.full((ROWS * HIDDEN,), v + rank, dtype=torch.bfloat16).cuda() for v in range(8)]
    sums = [world_size * v + world_size * (world_size - 1) // 2 for v in range(8)]
    outputs = torch.empty(BATCH, ROWS * HIDDEN, dtype=torch.bfloat16, device="cuda")
    torch.cuda._sleep(1)
    workspace = open_workspace(backend, ROWS, HIDDEN)
    calls, wrong, end = 0, 0, time.monotonic() + seconds
    while backend.allgather(time.monotonic() < end)[0]:
        expected = []
        for output in outputs:
            rows, hidden = shared.randint(1, ROWS), 8 * shared.randint(1, HIDDEN // 8)
            value, one_shot = shared.randrange(8), shared.choice([True, False])
            if own.random() < 0.2:
                torch.cuda._sleep(own.randrange(200_000))
            x = inputs[value][: rows * hidden].view(rows, hidden)
            out = output[: rows * hidden].view(rows, hidden)
            comm.allreduce_fusion(x, workspace, PLAIN, output=out, use_oneshot=one_shot)
            expected.append((rows * hidden, sums[value]))
        calls += BATCH
        for (count, total), got in zip(expected, outputs.cpu(), strict=True):
            wrong += int((got[:count] != total).sum())
    close(workspace, backend)
    return calls, wrong


def test_random_calls_with_delays(full):
    results = run_ranks(2, lambda backend: fuzz(backend, FULL_SECONDS if full else SECONDS))
    print(f"{results[0][0]} calls of random sizes with delays", flush=True)
    assert all(bad == 0 for _, bad in results)
