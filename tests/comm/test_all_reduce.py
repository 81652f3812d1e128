"""The plain all-reduce: bits, protocols, workspaces, graphs."""

from __future__ import annotations

import threading

import pytest
import torch

from flashinfer import comm
from flashinfer.jit.comm import AllReduceConfig, gen_all_reduce_module
from tests.comm.ranks import (
    TIMEOUT,
    bits,
    needs_gpu,
    numbers,
    rank_sum,
    ranks_of_tests,
    run_ranks,
    together,
)

pytestmark = needs_gpu
IN_A_CHILD = True
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = comm.AllReduceFusionPattern.kAllReduce


def open_workspace(backend, tokens=64, hidden=2048, dtype=torch.bfloat16, **options):
    workspace = comm.create_allreduce_fusion_workspace(
        "auto",
        backend.Get_size(),
        backend.Get_rank(),
        tokens,
        hidden,
        dtype,
        comm_backend=backend,
        **options,
    )
    workspace.set_timeout(TIMEOUT)
    torch.cuda.synchronize()
    backend.barrier()
    return workspace


def everyone_is_here(backend) -> None:
    """What ranks did before has ended: in a run whose calls overlap, before the first one."""
    torch.cuda.current_stream().synchronize()
    backend.barrier()


def close(workspace, backend) -> None:
    everyone_is_here(backend)
    workspace.destroy()


GROUPS = [*((n, BF16) for n in ranks_of_tests(2, 4, 8)), (2, FP16), (2, FP32)]
ALONE = ranks_of_tests(2)  # two ranks may share a GPU, more have one each


def modules():
    """The plain sum and the norm of every group; a workspace loads both."""
    return [
        gen_all_reduce_module(AllReduceConfig(dtype, ranks, output=output))
        for ranks, dtype in GROUPS
        for output in ("sum", "norm")
    ]


@pytest.mark.parametrize("one_shot", [True, False])
@pytest.mark.parametrize("world_size, dtype", GROUPS)
def test_all_ranks_hold_the_bits_of_the_sum(world_size, dtype, one_shot):
    shapes = [(1, 8), (1, 2048), (5, 264), (64, 2048), (63, 1000)]
    inputs = [
        [numbers(*shape, dtype=dtype, seed=97 * i + rank) for rank in range(world_size)]
        for i, shape in enumerate(shapes)
    ]

    def body(backend):
        workspace = open_workspace(backend, dtype=dtype, force_oneshot_support=one_shot)
        mine = [each[backend.Get_rank()].cuda() for each in inputs * 2]
        results = [torch.empty_like(x) for x in mine]
        everyone_is_here(backend)
        for x, out in zip(mine, results, strict=True):
            comm.allreduce_fusion(x, workspace, PLAIN, use_oneshot=one_shot, output=out)
        results = [out.cpu() for out in results]
        close(workspace, backend)
        return results

    everyone = run_ranks(world_size, body, freely=True)
    for i, each in enumerate(inputs * 2):
        expected = bits(rank_sum(each))
        for results in everyone:
            assert torch.equal(bits(results[i]), expected)


@pytest.mark.parametrize("one_shot", [True, False])
@pytest.mark.parametrize("ranks, dtype", [*((n, BF16) for n in ALONE), (2, FP32)])
def test_special_values_pass(ranks, dtype, one_shot):
    special = torch.tensor([-0.0, 0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 3e-39])
    x = special.to(dtype).repeat(32)
    words = torch.full((512,), -1, dtype=torch.int16)  # the sentinel of the protocol
    patterns = torch.cat([x, words.view(dtype)])

    def body(backend):
        workspace = open_workspace(backend, dtype=dtype)
        mine = patterns if backend.Get_rank() == 0 else torch.full_like(patterns, -0.0)
        out = comm.allreduce_fusion(mine.cuda(), workspace, PLAIN, use_oneshot=one_shot).cpu()
        close(workspace, backend)
        return out

    for out in run_ranks(ranks, body):
        assert torch.equal(out.isnan(), patterns.isnan())
        finite = ~patterns.isnan()
        assert torch.equal(bits(out[finite]), bits(patterns[finite]))


@pytest.mark.parametrize("one_shot", [True, False])
@pytest.mark.parametrize("ranks", ALONE)
def test_in_place_and_into_a_given_tensor(ranks, one_shot):
    x = [numbers(16, 512, dtype=torch.bfloat16, seed=rank) for rank in range(ranks)]

    def body(backend):
        workspace = open_workspace(backend)
        mine = x[backend.Get_rank()].cuda()
        out = torch.empty_like(mine)
        for place in (out, mine):
            made = comm.allreduce_fusion(mine, workspace, PLAIN, output=place, use_oneshot=one_shot)
            assert made is place
        close(workspace, backend)
        return out.cpu(), mine.cpu()

    for out, mine in run_ranks(ranks, body):
        assert torch.equal(out, rank_sum(x)) and torch.equal(mine, rank_sum(x))


@pytest.mark.parametrize("one_shot", [True, False])
@pytest.mark.parametrize("enable_pdl", [False, True])
@pytest.mark.parametrize("ranks", ALONE)
def test_capture_and_replay_with_other_work_between(ranks, enable_pdl, one_shot):
    x = [numbers(8, 2048, dtype=torch.bfloat16, seed=rank) for rank in range(ranks)]

    def body(backend):
        workspace = open_workspace(backend)
        mine = x[backend.Get_rank()].cuda()
        out, other = torch.empty_like(mine), torch.empty_like(mine)

        def call(target):
            comm.allreduce_fusion(
                mine, workspace, PLAIN, launch_with_pdl=enable_pdl, output=target,
                use_oneshot=one_shot,
            )  # fmt: skip

        everyone_is_here(backend)
        call(out)
        everyone_is_here(backend)
        graph = torch.cuda.CUDAGraph()
        with (
            capture_lock,
            torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"),
        ):
            for _ in range(3):
                call(out)
        backend.barrier()
        for _ in range(20):
            together(graph.replay)
            call(other)
        results = out.cpu(), other.cpu()
        close(workspace, backend)
        return results

    capture_lock = threading.Lock()
    for out, other in run_ranks(ranks, body, freely=True):
        assert torch.equal(out, rank_sum(x)) and torch.equal(other, rank_sum(x))


def test_two_groups_at_once_and_a_second_workspace():
    x = [numbers(8, 512, dtype=torch.bfloat16, seed=rank) for rank in range(4)]

    def body(backend):
        rank = backend.Get_rank()
        pair = backend.Split(rank // 2, rank)
        all_ranks, two_ranks = open_workspace(backend), open_workspace(pair)
        mine = x[rank].cuda()
        backend.barrier()
        results = []
        for _ in range(5):
            a = comm.allreduce_fusion(mine, all_ranks, PLAIN)
            b = comm.allreduce_fusion(mine, two_ranks, PLAIN)
            results = [a, b]
        results = [each.cpu() for each in results]
        close(two_ranks, backend)
        close(all_ranks, backend)
        return results

    for rank, (a, b) in enumerate(run_ranks(4, body)):
        first = rank // 2 * 2
        assert torch.equal(a, rank_sum(x))
        assert torch.equal(b, rank_sum(x[first : first + 2]))


def test_what_does_not_fit_is_refused_before_anything_is_sent():
    def body(backend):
        workspace = open_workspace(backend, tokens=4, hidden=512)
        assert workspace.is_buffer_size_sufficient(2, 4, 512, torch.bfloat16)
        assert not workspace.is_buffer_size_sufficient(2, 1 << 14, 1 << 14, torch.bfloat16)
        for x, message in (
            (torch.empty(1 << 12, 1 << 12, dtype=torch.bfloat16), "create the workspace for more"),
            (torch.empty(3, dtype=torch.bfloat16), "multiple of 8 elements"),
            (torch.empty(8, 16, dtype=torch.bfloat16).t(), "contiguous"),
        ):
            with pytest.raises(ValueError, match=message):
                comm.allreduce_fusion(x.cuda(), workspace, PLAIN, output=x.cuda())
        close(workspace, backend)
        with pytest.raises(ValueError, match="destroyed"):
            comm.allreduce_fusion(torch.empty(8).cuda(), workspace, PLAIN)

    run_ranks(2, body)


def test_workspaces_come_again_after_a_checkpoint():
    x = numbers(4, 512, dtype=torch.float16, seed=1)

    def body(backend):
        workspace = open_workspace(backend, dtype=torch.float16)
        workspace.checkpoint_prepare()
        workspace.checkpoint_restore(backend)
        out = comm.allreduce_fusion(x.cuda(), workspace, PLAIN).cpu()
        close(workspace, backend)
        return out

    for out in run_ranks(2, body):
        assert torch.equal(out, x + x)


def test_ranks_that_disagree_are_told_at_creation():
    def body(backend):
        with pytest.raises(ValueError, match=r"`hidden_dim` is \[512, 513\] by rank"):
            comm.create_allreduce_fusion_workspace(
                "trtllm",
                2,
                backend.Get_rank(),
                4,
                512 + backend.Get_rank(),
                torch.float16,
                comm_backend=backend,
            )

    run_ranks(2, body)


@pytest.mark.parametrize("ranks", ALONE)
def test_vllm_names_with_a_captured_graph(ranks):
    x = [numbers(16, 1024, dtype=BF16, seed=rank) for rank in range(ranks)]
    size = x[0].numel() * 2

    def body(backend):
        rank = backend.Get_rank()
        meta = comm.create_shared_buffer(comm.vllm_meta_size() + size, backend)
        data = comm.create_shared_buffer(size, backend)
        mine = x[rank].cuda()
        out = torch.zeros_like(mine)
        handle = comm.vllm_init_custom_ar(meta, torch.empty(1).cuda(), rank, True)
        comm.vllm_register_buffer(handle, data)
        comm.vllm_all_reduce(handle, mine, out, data[rank], size, 4)
        first = out.cpu()
        graph = torch.cuda.CUDAGraph()
        with (
            capture_lock,
            torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"),
        ):
            comm.vllm_all_reduce(handle, mine, out, 0, 0, 4)
        comm.vllm_register_graph_buffers(
            handle, *([], comm.vllm_get_graph_buffer_ipc_meta(handle)[1])
        )
        out.zero_()
        together(graph.replay)
        second = out.cpu()
        with pytest.raises(ValueError, match="`inp` must have at most"):
            comm.vllm_all_reduce(handle, mine, out, data[rank], size - 2, 4)
        with pytest.raises(ValueError, match="`reg_buffer` must be 0, or"):
            comm.vllm_all_reduce(handle, mine, out, 1, size, 4)
        everyone_is_here(backend)
        comm.vllm_dispose(handle)
        with pytest.raises(ValueError, match="`fa` must be an open handle"):
            comm.vllm_all_reduce(handle, mine, out, 0, 0, 4)
        comm.free_shared_buffer(data, backend)
        comm.free_shared_buffer(meta, backend)
        return first, second

    capture_lock = threading.Lock()
    for first, second in run_ranks(ranks, body):
        assert torch.equal(first, rank_sum(x)) and torch.equal(second, rank_sum(x))
