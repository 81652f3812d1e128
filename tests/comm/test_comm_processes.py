"""Ranks as processes over torch.distributed: memory handles, older names, errors in time.

Where they share a GPU its time is sliced, and a call takes some slices.
"""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flashinfer import comm
from flashinfer.comm.mnnvl import TorchDistBackend
from tests.comm.ranks import needs_gpu, numbers, rank_sum, ranks_of_tests

pytestmark = [needs_gpu, pytest.mark.alone]
PLAIN = comm.AllReduceFusionPattern.kAllReduce


def spawn(body, *args, ranks: int = 2, ends_well: int | None = None) -> None:
    """``body(rank, *args)`` in processes, each with a GPU and a process group.

    The first `ends_well` of them must end without an error; None: all.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.spawn(_start, (ranks, port, body, args), nprocs=ranks, join=ends_well is None)
    if context is not None and ends_well is not None:
        for process in context.processes:
            process.join(120)
        codes = [process.exitcode for process in context.processes]
        assert codes[:ends_well] == [0] * ends_well, codes


def _start(rank, ranks, port, body, args) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["FLASHINFER_COMM_TIMEOUT"] = "60"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    body(rank, *args)
    dist.destroy_process_group()


def reduce_by_every_interface(rank: int) -> None:
    ranks = dist.get_world_size()
    x = [numbers(33, 1024, dtype=torch.bfloat16, seed=r) for r in range(ranks)]
    mine, expected = x[rank].cuda(), rank_sum(x)
    for _ in range(2):  # the memory comes again after it was freed
        workspace = comm.create_allreduce_fusion_workspace(
            "auto", ranks, rank, 64, 1024, torch.bfloat16, group=dist.group.WORLD
        )
        for one_shot in (True, False, None):
            out = comm.allreduce_fusion(mine, workspace, PLAIN, use_oneshot=one_shot)
            assert torch.equal(out.cpu(), expected)
        workspace.destroy()
        workspace.destroy()

    handles, pointers, metadata = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, ranks, 64, 1024, create_metadata=True, comm_backend=TorchDistBackend()
    )
    out, residual, normed = (torch.empty_like(mine) for _ in range(3))
    weight = torch.ones(1024, dtype=torch.bfloat16, device="cuda")
    comm.trtllm_custom_all_reduce(mine, out, ranks, rank, pointers)
    assert torch.equal(out.cpu(), expected)
    comm.trtllm_allreduce_fusion(
        mine.view(-1), ranks, rank, 33, 1024, pointers, True, True, True,
        comm.AllReduceFusionPattern.kARResidualRMSNorm, None, out, mine, residual, normed,
        None, None, weight, 1e-6, None, None, metadata,
    )  # fmt: skip
    h = expected.float() + mine.cpu().float()
    assert torch.equal(residual.cpu(), h.bfloat16())
    reference = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(normed.cpu().float(), reference, rtol=2**-7, atol=1e-5)
    with pytest.raises(ValueError, match="`token_num` times `hidden_dim` must be at most"):
        comm.trtllm_allreduce_fusion(
            mine, ranks, rank, 65, 1024, pointers, False, True, True, PLAIN, None, out,
            None, None, None, None, None, None, None, None, None, metadata,
        )  # fmt: skip
    comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)

    shared = comm.create_shared_buffer(1024)
    assert len(shared) == ranks and len(set(shared)) == ranks
    comm.free_shared_buffer(shared)
    with pytest.raises(ValueError, match="`pointers` are of no open buffer"):
        comm.free_shared_buffer(shared)


@pytest.mark.parametrize("ranks", ranks_of_tests(2))
def test_every_interface_over_torch_distributed(ranks):
    spawn(reduce_by_every_interface, ranks=ranks)


def fail(rank: int, how: str) -> None:
    """All ranks must get an error soon after the last one dies or calls something else."""
    ranks = dist.get_world_size()
    last = ranks - 1
    workspace = comm.create_allreduce_fusion_workspace(
        "auto", ranks, rank, 64, 1024, torch.bfloat16, group=dist.group.WORLD
    )
    workspace.set_timeout(5.0 if how == "late" else 1.0)  # compilers may take the cores
    x = torch.ones(64, 1024, dtype=torch.bfloat16, device="cuda")
    comm.allreduce_fusion(x, workspace, PLAIN)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == last:
        if how == "late":
            time.sleep(0.5)
        if how == "other shape":
            comm.allreduce_fusion(x[:8], workspace, PLAIN)
            time.sleep(5)  # the others' time-out, also where the GPU is shared
        if how != "late":
            os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    if how == "late":
        assert comm.allreduce_fusion(x, workspace, PLAIN)[3, 5].item() == ranks
        os._exit(0)
    with pytest.raises(RuntimeError):
        comm.allreduce_fusion(x, workspace, PLAIN)
        torch.cuda.synchronize()
    took = time.monotonic() - start
    print(f"rank {rank}, {how}: an error after {took:.2f} s, time-out 1 s", flush=True)
    with pytest.raises(comm.CommError, match=rf"rank {rank} waited in vain .* of rank {last}"):
        workspace.check()
    with pytest.raises(comm.CommError, match="after 1 calls"):
        comm.allreduce_fusion(x, workspace, PLAIN)
    os._exit(0)


@pytest.mark.parametrize("ranks", ranks_of_tests(2))
@pytest.mark.parametrize("how", ["killed", "other shape", "late"])
def test_a_rank_that_does_not_come_ends_in_an_error(how, ranks):
    spawn(fail, how, ranks=ranks, ends_well=ranks if how == "late" else ranks - 1)
