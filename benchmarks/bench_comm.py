"""Communication on this machine, beside NCCL where it has the same operation.

usage: torchrun --nproc-per-node N benchmarks/bench_comm.py [--operation all-reduce ...]
       [--hidden 8192 ...] [--json FILE]

all-reduce   one-shot, two-shot, in 8 bits, fused with the norm, PyTorch's one-shot and two-shot
             over symmetric memory, and NCCL; then what `ONE_SHOT_BYTES` in
             flashinfer/comm/schedule.py should be for this number of ranks, and each size that
             takes more than it may with that: see `LIMITS`
exchange     all-gather and reduce-scatter
experts      dispatch and combine, 8 of 256 experts for a token, and gigabytes per second that
             the first rank sends to others meanwhile. A combine of 8 columns stands in for none,
             which a dispatch may not have
context      decode's partial results, and their sum by LSE: 128 heads of 128

`--operation all` runs them all. Each number is the slowest rank's median of replays of a CUDA
graph, in microseconds per call.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from harness import gpu_complaint

from flashinfer import comm, fused_add_rmsnorm
from flashinfer.comm import schedule

CALLS, REPEATS = 20, 20
TOKENS = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 2048)
NVLINK_GB_PER_S = 450.0  # of an H100 or H200, one way
# Up to so many bytes the sum may take this part of the better of PyTorch's; beyond, of NCCL's.
LIMITS = ((256 << 10, 0.9), (16 << 20, 0.95))
NCCL_LIMIT = 1.03
FUSED_BYTES, FUSED_US = 128 << 10, {4: 10.0, 8: 12.0}
Pattern = comm.AllReduceFusionPattern


def measure(call: Callable[..., object], *arguments: object) -> float:
    """Microseconds per call, of the slowest rank."""
    for _ in range(3):
        call(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call(*arguments)
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


Line = dict[str, float]


def all_reduce(hidden: int) -> Iterator[Line]:
    """One-shot and two-shot with and without the norm, the sum in 8 bits, and NCCL."""
    workspace = comm.create_allreduce_fusion_workspace(
        "auto",
        dist.get_world_size(),
        dist.get_rank(),
        2 * max(TOKENS),  # two ranks would have room for one-shot alone, and two-shot needs more
        hidden,
        torch.bfloat16,
        group=dist.group.WORLD,
        force_oneshot_support=True,
    )
    last = torch.zeros(max(TOKENS), hidden, device="cuda", dtype=torch.bfloat16)
    comm.quantized_all_reduce(last, dist.group.WORLD)  # memory for the largest call
    for tokens in TOKENS:
        yield all_reduce_line(tokens, hidden, workspace) | symmetric_line(tokens, hidden)
    workspace.destroy()


def symmetric_line(tokens: int, hidden: int) -> Line:
    """PyTorch's one-shot and two-shot over symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric

    name = dist.group.WORLD.group_name
    x = symmetric.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16).zero_()
    symmetric.rendezvous(x, name)
    operations = torch.ops.symm_mem
    return {
        "torch_one_shot": measure(operations.one_shot_all_reduce, x, "sum", name),
        "torch_two_shot": measure(operations.two_shot_all_reduce_, x, "sum", name),
    }


def fitted_threshold(table: list[Line]) -> int:
    """Bytes up to which one-shot should be taken: where the measured sizes lose least in all."""

    def lost(threshold: float) -> float:
        total = 0.0
        for line in table:
            for suffix in ("", "_norm"):
                one, two = line[f"one_shot{suffix}"], line[f"two_shot{suffix}"]
                total += (one if line["bytes"] <= threshold else two) / min(one, two) - 1
        return total

    sizes = sorted({line["bytes"] for line in table})
    return int(min([0, *sizes], key=lost))


def faults(table: list[Line], threshold: int, world_size: int) -> Iterator[str]:
    """What takes longer than it may."""
    for line in table:
        size = line["bytes"]
        kind = "one_shot" if size <= threshold else "two_shot"
        torch_us = min(line["torch_one_shot"], line["torch_two_shot"])
        limit = next((part for most, part in LIMITS if size <= most), None)
        what = f"{size >> 10} KB of {line['hidden']} columns, {kind}"
        if limit is not None and line[kind] > limit * torch_us:
            yield f"{what}: {line[kind]} us, {line[kind] / torch_us:.2f} of PyTorch's {torch_us}"
        if limit is None and line[kind] > NCCL_LIMIT * line["nccl"]:
            yield f"{what}: {line[kind]} us, {line[kind] / line['nccl']:.2f} of NCCL's"
        fused = line[f"{kind}_norm"]
        if size <= FUSED_BYTES and fused > FUSED_US.get(world_size, float("inf")):
            yield f"{what}, with the norm: {fused} us of {FUSED_US[world_size]}"


def judge(table: list[Line], world_size: int) -> str:
    """The threshold for `flashinfer/comm/schedule.py`, and what is too slow with it."""
    threshold = fitted_threshold(table)
    now = [line["bytes"] for line in table if schedule.takes_one_shot(line["bytes"], world_size)]
    found = list(faults(table, threshold, world_size))
    return "\n".join(
        [
            f"ONE_SHOT_BYTES[{world_size}] = {threshold >> 10} << 10  # now one-shot up to "
            f"{max(now, default=0) >> 10} KB of the measured sizes",
            *found,
            f"{len(found)} of {len(table)} sizes are too slow",
        ]
    )


def all_reduce_line(tokens: int, hidden: int, workspace: comm.AllReduceFusionWorkspace) -> Line:
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    out, residual, normed = torch.empty_like(x), torch.randn_like(x), torch.empty_like(x)
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    reduced = torch.zeros_like(x)

    def nccl_then_norm() -> None:
        dist.all_reduce(reduced)
        fused_add_rmsnorm(reduced, residual, weight)

    line = {"bytes": x.numel() * 2, "hidden": hidden}
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
    line["in_8_bits"] = measure(lambda: comm.quantized_all_reduce(x, dist.group.WORLD, output=out))
    line["nccl"] = measure(lambda: dist.all_reduce(reduced))
    line["nccl_norm"] = measure(nccl_then_norm)
    return line


def exchange(hidden: int) -> Iterator[Line]:
    """All-gather and reduce-scatter of a block for each rank."""
    world_size = dist.get_world_size()
    workspace = comm.ExchangeWorkspace(2 * max(TOKENS) * hidden, group=dist.group.WORLD)
    for tokens in TOKENS:
        part = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        whole = part.repeat(world_size, 1)
        out = torch.empty_like(part)
        yield {
            "bytes": part.numel() * 2,
            "all_gather": measure(comm.all_gather, part, workspace, whole),
            "nccl_all_gather": measure(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": measure(comm.reduce_scatter, whole, workspace, out),
            "nccl_reduce_scatter": measure(dist.reduce_scatter_tensor, out, whole),
        }
    workspace.destroy()


def there_and_back(
    layer: comm.MoeAlltoAll, ids: torch.Tensor, x: torch.Tensor, outputs: torch.Tensor | None
) -> None:
    """A dispatch and its combine; None: experts return what they get."""
    received, _ = layer.dispatch(ids, [x, ids], len(x))
    layer.combine(received if outputs is None else outputs, len(x))


def experts(hidden: int) -> Iterator[Line]:
    """Tokens to their experts and outputs back."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    top_k, num_experts = 8, 256
    mapping = comm.Mapping(world_size, rank, world_size, tp_size=world_size, moe_ep_size=world_size)
    layer = comm.MoeAlltoAll(mapping, 4096, top_k, num_experts, hidden_size=hidden)
    for tokens in (1, 16, 128, 512, 4096):
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        scores = torch.rand(tokens, num_experts, device="cuda")
        ids = scores.topk(top_k).indices.to(torch.int32)
        narrow = torch.zeros(world_size, tokens, 8, device="cuda", dtype=torch.bfloat16)

        dispatch = measure(there_and_back, layer, ids, x, narrow)
        both = measure(there_and_back, layer, ids, x, None)
        owners = ids // (num_experts // world_size)
        pairs = sum(int((owners == r).any(1).sum()) for r in range(world_size) if r != rank)
        yield {
            "tokens": tokens,
            "dispatch": dispatch,
            "dispatch_and_combine": both,
            "dispatch_gb_per_s": round(pairs * (2 * hidden + 4 * top_k) / dispatch / 1e3, 1),
            "combine_gb_per_s": round(pairs * 2 * hidden / max(both - dispatch, 1e-3) / 1e3, 1),
            "link_us": round(pairs * (2 * hidden + 4 * top_k) / NVLINK_GB_PER_S / 1e3, 2),
        }
    layer.checkpoint_prepare()


def context(hidden: int) -> Iterator[Line]:
    """Decode's partial results of 128 heads of 128 elements."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    heads, dim, most = 128 // world_size, 128, 128
    workspace = comm.decode_cp_a2a_lse_reduce_create_workspace(
        most, heads, world_size, dim, torch.bfloat16, dist.group.WORLD
    )
    place = workspace, rank, world_size
    for tokens in (1, 16, most):
        o = torch.randn(tokens, heads, world_size, dim, device="cuda", dtype=torch.bfloat16)
        lse = torch.randn(tokens, heads, world_size, device="cuda")
        yield {
            "tokens": tokens,
            "alltoall": measure(comm.decode_cp_a2a_alltoall, o, lse[..., None], *place),
            "lse_reduce": measure(comm.decode_cp_a2a_lse_reduce, o, lse, *place),
        }


OPERATIONS = {
    "all-reduce": all_reduce,
    "exchange": exchange,
    "experts": experts,
    "context": context,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--operation", nargs="+", choices=[*OPERATIONS, "all"], default=["all-reduce"]
    )
    parser.add_argument("--hidden", nargs="+", type=int, default=[8192], help="columns")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun, which says what each rank's GPU is")
    if complaint := gpu_complaint():
        parser.error(complaint)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    tables: dict[str, list[Line]] = {}
    for name in OPERATIONS if "all" in options.operation else options.operation:
        table = tables[name] = []
        for hidden in options.hidden if name != "context" else options.hidden[:1]:
            for line in OPERATIONS[name](hidden):
                table.append(line)
                if dist.get_rank() == 0:
                    print(name, line, flush=True)
        if dist.get_rank() == 0:
            if name == "all-reduce":
                print(judge(table, dist.get_world_size()), flush=True)
            if options.json:
                options.json.write_text(json.dumps(tables, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
