"""CUDA graphs that serve other batches after planning anew; wrappers on two streams; workspaces."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from tests.attention.batches import (
    BF16,
    Batch,
    indptr,
    need_backend,
    plan_decode,
    plan_paged,
    randn,
    workspace,
)

CAPACITY = 8
PAGES = 400


def _int32(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _graph_decode(device: torch.device) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device),
        use_cuda_graph=True,
        paged_kv_indptr_buffer=_int32(CAPACITY + 1, device),
        paged_kv_indices_buffer=_int32(PAGES, device),
        paged_kv_last_page_len_buffer=_int32(CAPACITY, device),
    )


def _plan(wrapper, batch: Batch, device: torch.device) -> None:
    starts, indices, last, _ = batch.table()
    wrapper.plan(starts, indices.to(device), last, 8, 2, 128, 16, q_data_type=BF16)


def _captured(run) -> torch.cuda.CUDAGraph:
    """`run` in a graph, after a first call that compiles and loads what it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.gpu
def test_one_decode_graph_serves_every_batch(device):
    wrapper = _graph_decode(device)
    usual = Batch((1,) * CAPACITY, (64,) * CAPACITY)
    _plan(wrapper, usual, device)
    q = torch.zeros(CAPACITY, 8, 128, dtype=BF16, device=device)
    cache = tuple(torch.zeros(PAGES, 16, 2, 128, dtype=BF16, device=device) for _ in range(2))
    out, lse = torch.zeros_like(q), torch.zeros(CAPACITY, 8, device=device)
    graph = _captured(lambda: wrapper.run(q, cache, out=out, lse=lse, return_lse=True))
    for lengths in ((700,) * 8, (1,), (0, 5), (5000, 3, 64, 0, 1), (16,) * 8, (6000,)):
        batch = Batch((1,) * len(lengths), lengths, seed=sum(lengths))
        for mine, theirs in zip(cache, batch.cache(device), strict=True):
            mine[: len(theirs)].copy_(theirs)
        n = len(lengths)
        q[:n] = batch.query(device)
        _plan(wrapper, batch, device)
        out.fill_(float("nan"))
        graph.replay()
        expected = plan_decode(batch, device).run(q[:n], cache, return_lse=True)
        torch.testing.assert_close(out[:n].float(), expected[0].float(), rtol=0.01, atol=2e-3)
        torch.testing.assert_close(lse[:n], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_one_prefill_graph_serves_every_batch(backend, device):
    tokens = 128
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device),
        use_cuda_graph=True,
        qo_indptr_buf=_int32(CAPACITY + 1, device),
        paged_kv_indptr_buf=_int32(CAPACITY + 1, device),
        paged_kv_indices_buf=_int32(PAGES, device),
        paged_kv_last_page_len_buf=_int32(CAPACITY, device),
        backend=backend,
    )

    def plan(batch: Batch) -> None:
        starts, indices, last, _ = batch.table()
        wrapper.plan(
            *(indptr(batch.qo_lens), starts, indices.to(device), last, 8, 2, 128, 16),
            causal=True,
            q_data_type=BF16,
        )

    plan(Batch((16,) * CAPACITY, (64,) * CAPACITY))
    q = torch.zeros(tokens, 8, 128, dtype=BF16, device=device)
    cache = tuple(torch.zeros(PAGES, 16, 2, 128, dtype=BF16, device=device) for _ in range(2))
    out = torch.zeros_like(q)
    graph = _captured(lambda: wrapper.run(q, cache, out=out))
    for seed, (qo, kv) in enumerate(
        [((1,) * 8, (300,) * 8), ((128,), (128,)), ((5, 0, 60), (90, 3, 2000)), ((100,), (5000,))]
    ):
        batch = Batch(qo, kv, seed=seed)
        for mine, theirs in zip(cache, batch.cache(device), strict=True):
            mine[: len(theirs)].copy_(theirs)
        n = sum(qo)
        q[:n] = batch.query(device)
        plan(batch)
        graph.replay()
        expected = plan_paged(batch, device, backend, causal=True).run(q[:n], cache)
        torch.testing.assert_close(out[:n].float(), expected.float(), rtol=0.01, atol=2e-3)


@pytest.mark.gpu
def test_graphs_of_the_same_call_replay_at_a_time(backend, device):
    """Of a function without plan: two graphs on two streams, one of which has two branches."""
    single = flashinfer.single_prefill_with_kv_cache
    # More lists than there are multiprocessors, so that the kernel for Hopper takes some later.
    k, v = (randn((6000, 2, 128), BF16, device, seed) for seed in (1, 2))
    queries = [randn((6000, 8, 128), BF16, device, seed) for seed in (3, 4, 5)]
    expected = [single(q, k, v, causal=True, backend=backend) for q in queries]
    outs: list[torch.Tensor] = []

    def run(q: torch.Tensor) -> None:
        outs.append(single(q, k, v, causal=True, backend=backend))

    def run_branches() -> None:
        branch = torch.cuda.Stream()
        branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(branch):
            run(queries[1])
        run(queries[2])
        torch.cuda.current_stream().wait_stream(branch)

    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph, step in zip(graphs, (lambda: run(queries[0]), run_branches), strict=True):
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            step()
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(30):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for out, wanted in zip(outs, expected, strict=True):
            assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_growing_past_the_capacity_is_refused(device):
    wrapper = _graph_decode(device)
    _plan(wrapper, Batch((1,) * CAPACITY, (64,) * CAPACITY), device)
    with pytest.raises(ValueError, match="9 requests.*planned for 8"):
        _plan(wrapper, Batch((1,) * (CAPACITY + 1), (16,) * (CAPACITY + 1)), device)
    with pytest.raises(ValueError, match="indices"):
        _plan(wrapper, Batch((1,), (16 * PAGES + 16,)), device)


@pytest.mark.gpu
def test_planning_while_a_run_is_in_flight_does_not_disturb_it(device):
    """The work list of the next plan is copied after the run that reads the last one."""
    batches = [Batch((1,) * n, (200 * n,) * n, seed=n) for n in (1, 8, 3, 20)]
    expected = [plan_decode(b, device).run(b.query(device), b.cache(device)) for b in batches]
    prepared = [(b, b.query(device), b.cache(device)) for b in batches]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for batch, q, cache in prepared:
            _plan(wrapper, batch, device)
            results.append(wrapper.run(q, cache))
    for i, result in enumerate(results):
        assert torch.equal(result, expected[i % len(expected)])


@pytest.mark.gpu
def test_two_wrappers_on_two_streams(device):
    """Different batches at the same time: neither sees the other's plan or partial results."""
    batches = [Batch((1,) * 4, (3000, 500, 64, 1)), Batch((1,) * 6, (777,) * 6, seed=9)]
    wrappers = [plan_decode(batch, device) for batch in batches]
    prepared = [(b.query(device), b.cache(device)) for b in batches]
    expected = [w.run(*p) for w, p in zip(wrappers, prepared, strict=True)]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(30):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if len(results[i]) % 7 == 3:
                    _plan(wrappers[i], batches[i], device)
                results[i].append(wrappers[i].run(*prepared[i]))
    torch.cuda.synchronize()
    for i, outs in enumerate(results):
        assert all(torch.equal(out, expected[i]) for out in outs)


@pytest.mark.gpu
def test_steady_state_allocates_nothing_but_the_output(device):
    batch = Batch((1,) * 4, (3000, 500, 64, 1))
    wrapper = plan_decode(batch, device)
    q, cache = batch.query(device), batch.cache(device)
    out = torch.empty_like(q)
    starts, indices, last, _ = batch.table()
    indices = indices.to(device)
    for _ in range(3):
        wrapper.plan(starts, indices, last, 8, 2, 128, 16, q_data_type=BF16)
        wrapper.run(q, cache, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        wrapper.plan(starts, indices, last, 8, 2, 128, 16, q_data_type=BF16)
        wrapper.run(q, cache, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["decode", "prefill", "hopper"])
def test_workspace_size_is_exact(path, device):
    """Enough is enough, one byte less is refused with both numbers."""
    backend = "fa3" if path == "hopper" else "fa2"
    need_backend(backend, device)
    lengths = (20000, 64)
    batch = Batch((1, 1) if path == "decode" else (30, 7), lengths)
    starts, indices, last, _ = batch.table()
    wrapper_type = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    arguments = (starts, indices.to(device), last, 8, 2, 128, 16)
    if path != "decode":
        wrapper_type = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        arguments = (indptr(batch.qo_lens), *arguments)
    wrapper = wrapper_type(workspace(device), backend=backend)
    wrapper.plan(*arguments, q_data_type=BF16)
    q, cache = batch.query(device), batch.cache(device)
    expected = wrapper.run(q, cache)
    float_bytes, int_bytes = wrapper.workspace_size(*arguments, q_data_type=BF16)
    assert float_bytes > 0, "a request of 20,000 keys is split"

    def buffers(fewer: int, fewer_ints: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(
            torch.empty(n, dtype=torch.uint8, device=device)
            for n in (float_bytes - fewer, int_bytes - fewer_ints)
        )

    wrapper.reset_workspace_buffer(*buffers(0, 0))
    wrapper.plan(*arguments, q_data_type=BF16)
    assert torch.equal(wrapper.run(q, cache), expected)
    for fewer in ((16, 0), (0, 16)):
        wrapper.reset_workspace_buffer(*buffers(*fewer))
        needed, given = (float_bytes, float_bytes - 16) if fewer[0] else (int_bytes, int_bytes - 16)
        with pytest.raises(ValueError, match=f"{needed}.*{given}|{given}.*{needed}"):
            wrapper.plan(*arguments, q_data_type=BF16)
