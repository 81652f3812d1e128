"""Context parallelism by ranks that share a GPU: decode's exchange, LSE, parts of sequences."""

from __future__ import annotations

import pytest
import torch

from flashinfer import comm, merge_states
from flashinfer.comm import dcp_alltoall, exchange_call
from flashinfer.comm.mnnvl import MnnvlConfig
from flashinfer.jit.cascade import CascadeConfig, gen_cascade_module
from flashinfer.jit.comm import ExchangeConfig, gen_exchange_module
from tests.comm.ranks import TIMEOUT, needs_gpu, numbers, ranks_of_tests, run_ranks

pytestmark = needs_gpu
IN_A_CHILD = True
BF16, FP32 = torch.bfloat16, torch.float32
RANKS = ranks_of_tests(2, 4)


def modules():
    """The exchange, and the sum by LSE."""
    return [
        *(gen_exchange_module(ExchangeConfig(BF16, ranks)) for ranks in RANKS),
        gen_cascade_module(CascadeConfig(BF16, pair=False)),
    ]


def softmax_sum(o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Partial results ``[ranks, ...]`` weighted by their logarithms to base 2."""
    weights = (lse.double() - lse.double().amax(0)).exp2()
    weights = weights / weights.sum(0)
    return (o.double() * weights[..., None]).sum(0)


@pytest.mark.parametrize("ranks", RANKS)
def test_decode_gives_each_rank_its_heads(ranks):
    shape = (5, 3, ranks)
    o = [numbers(*shape, 64, dtype=BF16, seed=r) for r in range(ranks)]
    lse = [4 * numbers(*shape, dtype=FP32, seed=40 + r) for r in range(ranks)]
    lse[1][0, 0] = float("-inf")  # this rank has nothing of that context
    exchange_call.load(BF16, ranks)
    merge_states(o[0][..., None, :].cuda().view(-1, ranks, 1, 64), lse[0].cuda().view(-1, ranks, 1))
    torch.cuda.synchronize()

    def body(backend):
        rank = backend.Get_rank()
        mapping = comm.Mapping(ranks, rank, ranks, cp_size=ranks)
        workspace = comm.decode_cp_a2a_allocate_mnnvl_workspace(
            mapping, mnnvl_config=MnnvlConfig(comm_backend=backend)
        )
        comm.decode_cp_a2a_init_workspace(workspace, rank, ranks)
        small = comm.decode_cp_a2a_lse_reduce_create_workspace(5, 3, ranks, 64, BF16, backend)
        for each in (workspace, small):
            dcp_alltoall.opened(each, rank, ranks).set_timeout(TIMEOUT)
        mine, stats = o[rank].cuda(), lse[rank].cuda()
        torch.cuda.synchronize()
        backend.barrier()
        got = [
            t.cpu()
            for t in comm.decode_cp_a2a_alltoall(mine, stats[..., None], workspace, rank, ranks)
        ]
        reduced = comm.decode_cp_a2a_lse_reduce(mine, stats, small, rank, ranks).cpu()
        torch.cuda.current_stream().synchronize()
        backend.barrier()
        dcp_alltoall.close_workspace(workspace)
        dcp_alltoall.close_workspace(small)
        return (*got, reduced)

    for rank, (got_o, got_lse, reduced) in enumerate(run_ranks(ranks, body)):
        mine_o = torch.stack([each[..., rank, :] for each in o])
        mine_lse = torch.stack([each[..., rank] for each in lse])
        assert torch.equal(got_o, mine_o.movedim(0, -2))
        assert torch.equal(got_lse[..., 0], mine_lse.movedim(0, -1))
        expected = softmax_sum(mine_o, mine_lse)
        torch.testing.assert_close(reduced.double(), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("ranks", RANKS)
def test_sequences_become_heads_and_return(ranks):
    batch, seq, heads, dim = 2, 3, 2 * ranks, 16
    parts = [numbers(batch, seq, heads, dim, dtype=BF16, seed=r) for r in range(ranks)]
    exchange_call.load(BF16, ranks)

    def body(backend):
        rank = backend.Get_rank()
        ulysses = comm.UlyssesCommunicator(
            backend, max_elems=3 * batch * seq * heads * dim, dtype=BF16, backend="nvlink"
        )
        ulysses.set_timeout(TIMEOUT)
        mine = parts[rank].cuda()
        out = torch.zeros_like(parts[rank]).cuda()
        torch.cuda.synchronize()
        backend.barrier()
        scattered = ulysses.scatter_heads(mine)
        returned = ulysses.gather_heads(scattered)
        for offset in range(2):
            band = scattered.cpu()[:, :, offset : offset + 1].contiguous().cuda()
            ulysses.gather_output_head_chunk(band, local_heads=2, head_offset=offset, out=out)
        results = scattered.cpu(), returned.cpu(), out.cpu()
        torch.cuda.current_stream().synchronize()
        backend.barrier()
        ulysses.close()
        return results

    whole = torch.cat(parts, 1)
    for rank, (scattered, returned, out) in enumerate(run_ranks(ranks, body)):
        assert torch.equal(scattered, whole[:, :, 2 * rank : 2 * rank + 2])
        assert torch.equal(returned, parts[rank]) and torch.equal(out, parts[rank])
