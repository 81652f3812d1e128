"""Prefill attention by both kernels and by what ``auto`` takes, on a grid of 200 shapes.

::

    python benchmarks/bench_prefill_backends.py grid.json [--part 1/4]

This is what the rules of ``flashinfer/_attention/backends.py`` are made from. The kernels of a
shape are timed in turns, each as a CUDA graph of several runs, so that clocks and neighbours are
the same for all; the median round counts. Keys stay in the L2 cache where they fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import flashinfer
from flashinfer._attention import backends
from flashinfer.jit import build_jit_specs
from flashinfer.jit.attention import AttentionConfig, gen_attention_module
from flashinfer.testing import make_tensor
from flashinfer.testing.flops import attention_flops_with_actual_seq_lens

BACKENDS = ("fa2", "fa3", "auto")
ROUNDS, ROUND_US = 7, 2000.0
WORKSPACE_BYTES = 512 << 20
ALLOWED = 1.05  # of the time of the better kernel

# requests, query tokens, tokens of keys
LENGTHS = (
    *((1, 2, 4096), (1, 8, 4096), (1, 16, 1024), (1, 16, 16384), (1, 64, 64), (1, 64, 8192)),
    *((1, 128, 2048), (1, 256, 256), (1, 512, 512), (1, 512, 16384), (1, 1024, 1024)),
    *((1, 2048, 2048), (1, 8192, 8192), (4, 1024, 1024), (8, 2048, 2048), (16, 16, 2048)),
    *((32, 4, 1024), (32, 64, 1024), (32, 512, 512), (64, 128, 128)),
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What shapes have besides lengths; page size 0: ragged keys."""

    qo_heads: int
    kv_heads: int
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    page_size: int = 0
    causal: bool = True
    window_left: int = -1


KINDS = (
    Kind(32, 8),
    Kind(32, 8, page_size=16),
    Kind(32, 8, causal=False),
    Kind(32, 32),
    Kind(64, 8, page_size=16),
    Kind(28, 4, page_size=1),
    Kind(32, 8, window_left=1024),
    Kind(32, 8, 64, 64),
    Kind(16, 16, 192, 128),
    Kind(16, 8, 256, 256),
)
SHAPES = [(kind, *lengths) for kind in KINDS for lengths in LENGTHS]
Shape = tuple[Kind, int, int, int]


def planned(shape: Shape, backend: str, workspace: torch.Tensor) -> Any:
    """A wrapper after its plan, with every page in a random place."""
    kind, batch, qo_len, kv_len = shape
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32) * qo_len
    heads = (kind.qo_heads, kind.kv_heads, kind.head_dim_qk)
    options = dict(
        head_dim_vo=kind.head_dim_vo,
        causal=kind.causal,
        window_left=kind.window_left,
        q_data_type=torch.bfloat16,
    )
    if kind.page_size == 0:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
        kv_indptr = torch.arange(batch + 1, dtype=torch.int32) * kv_len
        wrapper.plan(qo_indptr, kv_indptr, *heads, **options)
        return wrapper
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
    count = -(-kv_len // kind.page_size)
    kv_indptr = torch.arange(batch + 1, dtype=torch.int32) * count
    order = torch.randperm(batch * count, generator=torch.Generator().manual_seed(0)).int()
    last = torch.full((batch,), kv_len - (count - 1) * kind.page_size, dtype=torch.int32)
    pages = order.to(workspace.device)
    wrapper.plan(qo_indptr, kv_indptr, pages, last, *heads, kind.page_size, **options)
    return wrapper


def compile_all(shapes: list[Shape]) -> None:
    """The modules of all plans at once, with every core; plans on the CPU say which these are."""
    configs: set[AttentionConfig] = set()
    with flashinfer.reference_backend():
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
        for shape in shapes:
            for backend in ("fa2", "fa3"):
                configs.add(planned(shape, backend, workspace)._executor.config)
    print(f"{len(shapes)} shapes, {len(configs)} modules", flush=True)
    build_jit_specs([gen_attention_module(config) for config in configs])


def tensors(shape: Shape) -> dict[str, Any]:
    """Of a run."""
    kind, batch, qo_len, kv_len = shape

    def make(*sizes: int) -> torch.Tensor:
        return make_tensor(*sizes, dtype=torch.bfloat16, device="cuda")

    q = make(batch * qo_len, kind.qo_heads, kind.head_dim_qk)
    out = torch.empty_like(q[..., : kind.head_dim_vo]).contiguous()
    rows: tuple[int, ...] = (batch * kv_len, kind.kv_heads)
    if kind.page_size:
        rows = (batch * -(-kv_len // kind.page_size), kind.page_size, kind.kv_heads)
    k, v = make(*rows, kind.head_dim_qk), make(*rows, kind.head_dim_vo)
    keys = {"paged_kv_cache": (k, v)} if kind.page_size else {"k": k, "v": v}
    return {"q": q, "out": out, **keys}


def captured(run: Callable[[], Any], count: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return graph


def elapsed_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def measured(shape: Shape, workspaces: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A row of the result: microseconds by backend, and which kernel ``auto`` took."""
    arguments = tensors(shape)
    wrappers = {name: planned(shape, name, workspaces[name]) for name in BACKENDS}
    count = max(
        1, min(50, int(ROUND_US / elapsed_us(captured(_run(wrappers["fa2"], arguments), 1))))
    )
    graphs = {name: captured(_run(w, arguments), count) for name, w in wrappers.items()}
    times: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for graph in graphs.values():
        graph.replay()
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(elapsed_us(graph) / count)
    us = {name: statistics.median(found) for name, found in times.items()}
    kind, batch, qo_len, kv_len = shape
    lengths = (torch.full((batch,), n, dtype=torch.int32) for n in (qo_len, kv_len))
    flops = attention_flops_with_actual_seq_lens(
        *lengths, kind.head_dim_qk, kind.head_dim_vo, kind.qo_heads, kind.causal
    )
    return {
        **dataclasses.asdict(kind),
        "batch": batch,
        "qo_len": qo_len,
        "kv_len": kv_len,
        "rows": qo_len * kind.qo_heads // kind.kv_heads,
        "us": us,
        "tflops": {name: flops / time * 1e-6 for name, time in us.items()},
        "auto": wrappers["auto"]._executor.config.backend,
        "auto_behind": us["auto"] / min(us["fa2"], us["fa3"]),
    }


def _run(wrapper: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
    return lambda: wrapper.run(**arguments)


def report(rows: list[dict[str, Any]]) -> str:
    """The shapes by kind and rows, and those where ``auto`` is behind."""
    shown = [
        [
            f"{r['qo_heads']}/{r['kv_heads']} {r['head_dim_qk']}/{r['head_dim_vo']}",
            f"page {r['page_size']}" if r["page_size"] else "ragged",
            "causal" if r["causal"] else "full",
            r["window_left"],
            f"{r['batch']} x {r['qo_len']} x {r['kv_len']}",
            r["rows"],
            *(r["us"][name] for name in BACKENDS),
            r["tflops"]["fa3"],
            r["us"]["fa2"] / r["us"]["fa3"],
            r["auto"] + ("  <--" if r["auto_behind"] > ALLOWED else ""),
        ]
        for r in rows
    ]
    names = [
        *("heads", "keys", "mask", "window", "lengths", "rows"),
        *(f"{n} us" for n in BACKENDS),
    ]
    names += ["fa3 TFLOP/s", "fa2 / fa3", "auto took"]
    behind = [r["auto_behind"] for r in rows if r["auto_behind"] > ALLOWED]
    worst = max(r["auto_behind"] for r in rows)
    return (
        tabulate(shown, headers=names, floatfmt=".4g")
        + f"\nauto is over {ALLOWED:.2f} times the better kernel in {len(behind)} of {len(rows)}"
        f" shapes; at worst {worst:.3f} times"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="JSON file for the results")
    parser.add_argument("--part", default="1/1", help="such as 2/4: every fourth shape")
    arguments = parser.parse_args()
    if not backends.is_hopper(torch.device("cuda", 0)):
        print("needs a GPU of compute capability 9.0")
        return 3
    number, parts = map(int, arguments.part.split("/"))
    shapes = SHAPES[number - 1 :: parts]
    compile_all(shapes)
    workspaces = {
        name: torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda") for name in BACKENDS
    }
    rows = [measured(shape, workspaces) for shape in shapes]
    facts = {"device": torch.cuda.get_device_name(), "flashinfer": flashinfer.__version__}
    arguments.output.write_text(json.dumps({**facts, "shapes": rows}, indent=1))
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
