"""The two-sided all-to-all of experts without a GPU: its exchanges by loops, ranks as threads."""

from __future__ import annotations

import threading

import pytest
import torch

from flashinfer.comm import Mapping, moe_a2a, trtllm_alltoall
from flashinfer.comm.comm_backend import ThreadBackend
from flashinfer.comm.mnnvl import MnnvlConfig, MnnvlMemory
from flashinfer.comm.trtllm_alltoall import MnnvlMoe

RANKS, PER_RANK, TOP_K, HIDDEN, MOST = 3, 4, 2, 16, 7
SLOTS = RANKS * PER_RANK


class Memory:
    """Instead of peer memory: the group, and what a dispatch leaves for its combine."""

    made: dict[int, Memory] = {}

    def __init__(self, num_bytes, backend):
        self.num_bytes, self.backend = num_bytes, backend
        self.tensor = torch.zeros(1)
        self.made[self.tensor.data_ptr()] = self

    def close(self):
        self.backend.barrier()


def of_rank(experts, rank):
    """Numbers of the tokens with an expert of `rank`."""
    first = rank * PER_RANK
    return ((experts >= first) & (experts < first + PER_RANK)).any(1).nonzero().flatten()


def dispatch(experts, payloads, workspace, metainfo, most, rank, size, top_k, slots, **options):
    memory = Memory.made[workspace.data_ptr()]
    assert memory.num_bytes >= sum(most * size * p[:1].nbytes for p in payloads)
    everyone = memory.backend.allgather((experts, payloads, options["eplb_local_stats"]))
    received = [torch.full((size, most, *p.shape[1:]), 77).to(p.dtype) for p in payloads]
    memory.counts = []
    for source, (its_experts, its_payloads, _) in enumerate(everyone):
        mine = of_rank(its_experts, rank)
        memory.counts.append(len(mine))
        for to, payload in zip(received, its_payloads, strict=True):
            to[source, : len(mine)] = payload[mine]
    memory.experts = experts
    stats = [each[2] for each in everyone]
    return received, 0, None if stats[0] is None else torch.stack(stats)


def sanitize(experts, workspace, metainfo, rank, invalid):
    for source, count in enumerate(Memory.made[workspace.data_ptr()].counts):
        experts[source, count:] = invalid


def combine(payload, tokens, workspace, metainfo, most, rank, size, top_k, offset):
    memory = Memory.made[workspace.data_ptr()]
    total = torch.zeros(tokens, payload.shape[2])
    for target, outputs in enumerate(memory.backend.allgather(payload)):
        mine = of_rank(memory.experts, target)
        total[mine] += outputs[rank, : len(mine)].float()
    return total.to(payload.dtype)


@pytest.fixture
def by_loops(monkeypatch):
    monkeypatch.setattr(trtllm_alltoall, "ExpertMemory", Memory)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name, function in (
        ("moe_a2a_initialize", lambda *arguments: torch.tensor(0)),
        ("moe_a2a_dispatch", dispatch),
        ("moe_a2a_sanitize_expert_ids", sanitize),
        ("moe_a2a_combine", combine),
    ):
        monkeypatch.setattr(moe_a2a, name, function)


def run(body) -> list:
    backends = ThreadBackend.create(RANKS, timeout=20)
    results: list = [None] * RANKS

    def call(rank):
        try:
            results[rank] = body(backends[rank])
        except BaseException as error:
            results[rank] = error
            backends[rank].abort()

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_tokens_go_out_and_outputs_come_back(by_loops):
    generator = torch.Generator().manual_seed(0)
    tokens = [5, 0, MOST]
    draw = [torch.randint(-1, SLOTS + 1, (n, TOP_K), generator=generator) for n in tokens]
    experts = [ids.to(torch.int32) for ids in draw]
    scales = [torch.rand(n, TOP_K, generator=generator) + 0.5 for n in tokens]
    x = [torch.randn(n, 40 * HIDDEN, generator=generator) for n in tokens]

    def body(backend):
        rank = backend.Get_rank()
        prepare, moves = (trtllm_alltoall.open_workspace(backend) for _ in range(2))
        info, ids, weights, statics = MnnvlMoe.mnnvl_moe_alltoallv_prepare_without_allgather(
            experts[rank], scales[rank], torch.full((5,), rank, dtype=torch.int32), prepare,
            MOST, rank, RANKS, 5, SLOTS, TOP_K,
        )  # fmt: skip
        got = MnnvlMoe.mnnvl_moe_alltoallv(x[rank], info, moves, rank, RANKS)
        combined = MnnvlMoe.mnnvl_moe_alltoallv_combine(
            2 * got.nan_to_num(), info, moves, rank, RANKS, TOP_K, tokens[rank]
        )
        with pytest.raises(ValueError, match="`x` must have"):
            MnnvlMoe.mnnvl_moe_alltoallv(x[0][:3], info, moves, rank, RANKS)
        with pytest.raises(ValueError, match="`ep_rank` and `ep_size` must be those"):
            MnnvlMoe.mnnvl_moe_alltoallv(x[rank], info, moves, rank, RANKS + 1)
        trtllm_alltoall.close_workspace(prepare)
        trtllm_alltoall.close_workspace(moves)
        with pytest.raises(ValueError, match="and open"):
            MnnvlMoe.mnnvl_moe_alltoallv(x[rank], info, moves, rank, RANKS)
        return ids, weights, statics, got, combined

    for rank, (ids, weights, statics, got, combined) in enumerate(run(body)):
        assert torch.equal(statics, torch.arange(RANKS, dtype=torch.int32)[:, None].expand(-1, 5))
        assert len(ids) == len(weights) == len(got) == RANKS * MOST
        for source in range(RANKS):
            mine = of_rank(experts[source], rank)
            rows = slice(source * MOST, source * MOST + len(mine))
            rest = slice(source * MOST + len(mine), (source + 1) * MOST)
            assert torch.equal(ids[rows], experts[source][mine])
            given = scales[source].masked_fill(experts[source] == SLOTS, 0)
            assert torch.equal(weights[rows], given[mine])
            assert torch.equal(got[rows], x[source][mine])
            assert (ids[rest] == SLOTS).all() and (weights[rest] == 0).all()
        times = sum(torch.isin(torch.arange(tokens[rank]), of_rank(experts[rank], r)).int()
                    for r in range(RANKS))  # fmt: skip
        torch.testing.assert_close(combined, 2 * times[:, None] * x[rank])


def test_names_around_it(monkeypatch):
    MnnvlMemory.initialize()
    assert not MnnvlMemory.supports_mnnvl()
    experts = torch.tensor([[0, 3, 4, 11]])
    assert MnnvlMoe.compute_target_rank_id(experts, SLOTS, RANKS).tolist() == [[0, 0, 1, 2]]
    with pytest.raises(ValueError, match="`expert_count` must be a multiple of 3"):
        MnnvlMoe.compute_target_rank_id(experts, 10, RANKS)
    for name in ("moe_workspace_tensor", "moe_prepare_workspace_tensor", "moe_mapping"):
        monkeypatch.setattr(MnnvlMoe, name, None)
    config = MnnvlConfig(comm_backend=ThreadBackend.create(1)[0])
    mapping = Mapping(1, 0, 1)
    first = MnnvlMoe.get_moe_workspaces(mapping, config)
    assert MnnvlMoe.get_moe_workspaces(mapping, config) is first
    assert MnnvlMoe.get_moe_prepare_workspace(mapping, config) is not first
    with pytest.raises(ValueError, match="`mapping` must be that of the first call"):
        MnnvlMoe.get_moe_workspaces(Mapping(2, 0, 2, tp_size=2), config)
    trtllm_alltoall.close_workspace(first)
