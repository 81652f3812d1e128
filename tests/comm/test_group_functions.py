"""Functions that are given a group alone: the sum in 8 bits, and the gathered product."""

from __future__ import annotations

import pytest
import torch

from flashinfer import comm
from flashinfer.comm import exchange_call, group_memory, quantized_allreduce
from flashinfer.jit.comm import (
    ExchangeConfig,
    QuantizedAllReduceConfig,
    gen_exchange_module,
    gen_quantized_all_reduce_module,
)
from tests.comm.ranks import MORE_GPUS, bits, needs_gpu, numbers, run_ranks

pytestmark = needs_gpu
IN_A_CHILD = True
BF16 = torch.bfloat16
GROUPS = [(2, 128), (4, 32), *((n, 64) for n in MORE_GPUS)]


def modules():
    """The sum in 8 bits, and the exchange of the product."""
    configs = [QuantizedAllReduceConfig(BF16, ranks, scales) for ranks, scales in GROUPS]
    return [
        *(gen_quantized_all_reduce_module(config) for config in configs),
        gen_exchange_module(ExchangeConfig(BF16, 2)),
    ]


@pytest.mark.parametrize(("ranks", "scales"), GROUPS)
def test_sums_in_8_bits(ranks, scales):
    shapes = [(1, 16), (3, 272), (64, 1024)]
    inputs = [[numbers(*s, dtype=BF16, seed=r) for r in range(ranks)] for s in shapes]
    quantized_allreduce.load(QuantizedAllReduceConfig(BF16, ranks, scales))

    def body(backend):
        rank, results = backend.Get_rank(), []
        group_memory.memory_of("quantized_all_reduce", backend, lambda ranks: 1 << 20).set_timeout(
            20
        )
        torch.cuda.synchronize()
        backend.barrier()
        for each in inputs * 2:
            x = each[rank].cuda()
            out = comm.quantized_all_reduce(x, backend, scale_group=scales)
            results.append(out.cpu())
        with pytest.raises(ValueError, match="`num_warps` must be None"):
            comm.quantized_all_reduce(x, backend, num_warps=4)
        torch.cuda.current_stream().synchronize()
        backend.barrier()
        return results

    everyone = run_ranks(ranks, body)
    for i, each in enumerate(inputs * 2):
        total = torch.stack([x.double() for x in each]).sum(0)
        largest = torch.stack([x.double().abs().max() for x in each]).sum()
        for results in everyone:
            assert torch.equal(bits(results[i]), bits(everyone[0][i]))
            assert (results[i].double() - total).abs().max() <= 0.08 * largest
            error = (results[i].double() - total).norm() / total.norm()
            assert error < 0.08  # e4m3 rounds by 2.6 % of a value, twice


def test_gathered_rows_are_multiplied():
    ranks = 2
    x = [numbers(24, 64, dtype=BF16, seed=r) for r in range(ranks)]
    w = numbers(32, 64, dtype=BF16, seed=9)
    exchange_call.load(BF16, ranks)

    def body(backend):
        mine, weight = x[backend.Get_rank()].cuda(), w.cuda().t()
        torch.mm(mine, weight)  # cuBLAS loads before a rank waits
        torch.cuda.synchronize()
        backend.barrier()
        out = comm.all_gather_matmul(mine, weight, backend).cpu()
        with pytest.raises(ValueError, match="`w` .64, n. of"):
            comm.all_gather_matmul(mine, w.cuda(), backend)
        torch.cuda.current_stream().synchronize()
        backend.barrier()
        return out

    for out in run_ranks(ranks, body):
        expected = torch.cat(x).double() @ w.double().t()
        torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=0.05)
