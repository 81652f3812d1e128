"""All-reduce on this machine: one-shot, two-shot and fused with the norm, beside NCCL.

usage: torchrun --nproc-per-node N benchmarks/bench_comm.py [--hidden 8192] [--json FILE]

Each number is the slowest rank's median of replays of a CUDA graph, in microseconds per call. The
last line says where two-shot overtakes one-shot: what `ONE_SHOT_BYTES` in
flashinfer/comm/schedule.py should be for this number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from flashinfer import comm, fused_add_rmsnorm

CALLS, REPEATS = 20, 20
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
Pattern = comm.AllReduceFusionPattern


def measure(call: Callable[[], object]) -> float:
    """Microseconds per call, of the slowest rank."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    median = torch.tensor(sorted(times)[REPEATS // 2], device="cuda")
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return round(median.item(), 2)


def rows(tokens: int, hidden: int, workspace: comm.AllReduceFusionWorkspace) -> dict[str, float]:
    """One line of the table."""
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    out, residual, normed = torch.empty_like(x), torch.randn_like(x), torch.empty_like(x)
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    reduced = torch.zeros_like(x)

    def nccl_then_norm() -> None:
        dist.all_reduce(reduced)
        fused_add_rmsnorm(reduced, residual, weight)

    line = {"bytes": x.numel() * 2}
    for name, one_shot in (("one_shot", True), ("two_shot", False)):
        line[name] = measure(
            lambda one_shot=one_shot: comm.allreduce_fusion(
                x, workspace, Pattern.kAllReduce, output=out, use_oneshot=one_shot
            )
        )
        line[f"{name}_norm"] = measure(
            lambda one_shot=one_shot: comm.allreduce_fusion(
                x,
                workspace,
                Pattern.kARResidualRMSNorm,
                residual_in=residual,
                residual_out=out,
                norm_out=normed,
                rms_gamma=weight,
                use_oneshot=one_shot,
            )
        )
    line["nccl"] = measure(lambda: dist.all_reduce(reduced))
    line["nccl_norm"] = measure(nccl_then_norm)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=8192, help="columns")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    workspace = comm.create_allreduce_fusion_workspace(
        "auto",
        world_size,
        rank,
        max(TOKENS),
        options.hidden,
        torch.bfloat16,
        group=dist.group.WORLD,
        force_oneshot_support=True,
    )
    table = []
    for tokens in TOKENS:
        table.append(rows(tokens, options.hidden, workspace))
        if rank == 0:
            print(table[-1], flush=True)
    slower = [line["bytes"] for line in table if line["two_shot"] < line["one_shot"]]
    if rank == 0:
        print(f"two-shot is faster from {min(slower, default=0)} bytes on (0: at no size)")
        if options.json:
            options.json.write_text(json.dumps(table, indent=1))
    workspace.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
