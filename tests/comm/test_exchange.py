"""All-gather and reduce-scatter."""

from __future__ import annotations

import pytest
import torch

from flashinfer import comm
from flashinfer.comm import exchange_call
from flashinfer.jit.comm import ExchangeConfig, gen_exchange_module
from tests.comm.ranks import (
    TIMEOUT,
    bits,
    needs_gpu,
    numbers,
    rank_sum,
    ranks_of_tests,
    run_ranks,
)

pytestmark = needs_gpu
IN_A_CHILD = True


GROUPS = [(2, torch.float32), *((n, torch.bfloat16) for n in ranks_of_tests(8))]


def modules():
    """The exchange with and without sums."""
    return [
        gen_exchange_module(ExchangeConfig(dtype, ranks, adds))
        for ranks, dtype in GROUPS
        for adds in (False, True)
    ]


@pytest.mark.parametrize("world_size, dtype", GROUPS)
def test_gather_and_scatter(world_size, dtype):
    shapes = [(1, 2), (3, 24), (16, 512)]
    local = [[numbers(*s, dtype=dtype, seed=r) for r in range(world_size)] for s in shapes]
    whole = [
        [numbers(world_size * s[0], s[1], dtype=dtype, seed=40 + r) for r in range(world_size)]
        for s in shapes
    ]

    for adds in (False, True):
        exchange_call.load(dtype, world_size, adds)

    def body(backend):
        workspace = comm.ExchangeWorkspace(1 << 16, backend)
        workspace.set_timeout(TIMEOUT)
        torch.cuda.synchronize()
        backend.barrier()
        rank, results = backend.Get_rank(), []
        for a, b in zip(local, whole, strict=True):
            gathered = comm.all_gather(a[rank].cuda(), workspace)
            scattered = comm.reduce_scatter(b[rank].cuda(), workspace)
            results.append((gathered.cpu(), scattered.cpu()))
        backend.barrier()
        workspace.destroy()
        return results

    for rank, results in enumerate(run_ranks(world_size, body)):
        for (gathered, scattered), a, b in zip(results, local, whole, strict=True):
            assert torch.equal(bits(gathered), bits(torch.cat(a)))
            n = scattered.shape[0]
            assert torch.equal(bits(scattered), bits(rank_sum(b)[rank * n : (rank + 1) * n]))
