"""Prefill attention by both kernels and by what ``auto`` takes, on a grid of 200 shapes.

::

    python benchmarks/bench_prefill_backends.py grid.json [--csv grid.csv] [--seconds 60]
    python benchmarks/bench_prefill_backends.py drawn.json --random 200 [--seed 1]

``prefill_backends_h200.csv`` is the table of one run, which the unit tests hold the rules against.
`--random` times shapes that nothing is fitted to, with soft caps, ALiBi, windows and 8-bit keys
among them. The grid is what the rules of ``flashinfer/_attention/plan/speeds.py`` are made from.
The kernels of a shape are timed in turns, each as a CUDA graph of several runs, so that clocks and
neighbours are the same for all; the median round counts. Runs take turns with copies of keys and
values that together do not fit the L2 cache, as those of a model's layers do not; only what is less
than a thirtieth of that stays there. For mixed batches, a launch of each kernel ("apart") is timed
too.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate

import flashinfer
from flashinfer._attention.plan import choice as backends
from flashinfer._attention.plan import mixed
from flashinfer.jit import build_jit_specs
from flashinfer.jit.attention import AttentionConfig, gen_attention_module
from flashinfer.testing import make_tensor
from flashinfer.testing.flops import attention_flops_with_actual_seq_lens

FORCED, APART = ("fa2", "fa3"), "apart"
BACKENDS = (*FORCED, "auto")
ROUNDS, ROUND_US, MOST_RUNS = 5, 600.0, 30
WORKSPACE_BYTES = 512 << 20
COLD_BYTES = 150 << 20  # of keys and values in turn: three times the L2 cache of an H200
ALLOWED = 1.05  # of the time of the better kernel
MEASURED = Path(__file__).parent / "prefill_backends_h200.csv"

Lengths = tuple[tuple[int, int, int], ...]
"""Parts of a batch: requests, query tokens of each, tokens of keys of each."""

LENGTHS: tuple[Lengths, ...] = (
    *(((1, 2, 4096),), ((1, 16, 1024),), ((1, 16, 16384),), ((1, 64, 64),), ((1, 64, 8192),)),
    *(((1, 128, 2048),), ((1, 256, 256),), ((1, 512, 512),), ((1, 512, 16384),)),
    *(((1, 2048, 2048),), ((1, 8192, 8192),), ((4, 1024, 1024),), ((8, 2048, 2048),)),
    *(((16, 16, 2048),), ((32, 4, 1024),), ((32, 64, 1024),), ((32, 512, 512),)),
    *(((64, 128, 128),), ((1, 4096, 4096), (15, 128, 128)), ((1, 512, 8192), (31, 1, 1024))),
)

MIXED_LENGTHS: tuple[Lengths, ...] = (
    *(((64, 1, 1024), (1, 512, 512)), ((64, 1, 1024), (1, 2048, 2048))),
    *(((128, 1, 2048), (1, 512, 4096)), ((16, 1, 4096), (4, 512, 512))),
    *(((256, 1, 1024), (1, 1024, 1024)), ((8, 1, 8192), (1, 4096, 4096))),
    *(((32, 1, 2048), (8, 256, 1024)), ((4, 1, 1024), (1, 256, 256))),
    *(((1, 1, 16384), (1, 128, 128)), ((100, 1, 500), (2, 1000, 3000))),
)
"""Of requests that decode and others, for ``BatchAttention``."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """Properties of shapes besides lengths; page size 0: ragged keys."""

    qo_heads: int
    kv_heads: int
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    page_size: int = 0
    causal: bool = True
    window_left: int = -1
    mixed: bool = False  # BatchAttention, else the wrappers for prefill
    kv_dtype: str = "bfloat16"
    capped: bool = False  # soft cap
    alibi: bool = False
    mask: str = ""  # "custom" or "items", in place of `causal`

    @property
    def kv_data_type(self) -> torch.dtype:
        dtype = getattr(torch, self.kv_dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


KINDS = (
    Kind(32, 8),
    Kind(32, 8, page_size=16),
    Kind(32, 8, causal=False),
    Kind(32, 32, page_size=16),
    Kind(64, 8, page_size=16, window_left=1024),
    Kind(28, 4, page_size=1),
    Kind(32, 8, 64, 64),
    Kind(16, 16, 192, 128),
    Kind(16, 8, 256, 256, page_size=16),
)
MIXED_KINDS = (Kind(32, 8, page_size=16, mixed=True), Kind(16, 8, 256, 256, 16, mixed=True))

Shape = tuple[Kind, Lengths]
SHAPES: list[Shape] = [(kind, lengths) for kind in KINDS for lengths in LENGTHS]
SHAPES += [(kind, lengths) for kind in MIXED_KINDS for lengths in MIXED_LENGTHS]


def random_shapes(count: int, seed: int) -> list[Shape]:
    """Shapes of any kind, with lengths and numbers of requests whose logarithms are uniform."""
    rng = random.Random(seed)
    head_dims = ((64, 64), (96, 96), (128, 128), (128, 128), (192, 128), (256, 256))
    found: list[Shape] = []
    while len(found) < count:
        mixed = rng.random() < 0.2
        kv_heads = rng.choice([1, 2, 4, 8, 16])
        kind = Kind(
            kv_heads * rng.choice([1, 2, 4, 5, 7, 8]),
            kv_heads,
            *rng.choice(head_dims),
            page_size=16 if mixed else rng.choice([0, 0, 1, 16, 16, 24, 64]),
            causal=mixed or rng.random() < 0.7,
            window_left=rng.choice([-1, -1, -1, 128, 1024]) if not mixed else -1,
            mixed=mixed,
            kv_dtype=rng.choice(["bfloat16"] * 3 + ["float8_e4m3fn"]),
            capped=not mixed and rng.random() < 0.2,
            alibi=not mixed and rng.random() < 0.1,
        )
        parts = []
        for decodes in [True, False] if mixed else [False] * rng.choice([1, 1, 2]):
            requests = int(2 ** rng.uniform(0, 7 if decodes else 5))
            kv_len = int(2 ** rng.uniform(5, 14))
            qo_len = 1 if decodes else min(kv_len, int(2 ** rng.uniform(0, 13)))
            parts.append((requests, qo_len, kv_len))
        products = sum(n * qo * kv for n, qo, kv in parts) * kind.qo_heads * kind.head_dim_qk
        keys = sum(n * kv for n, _, kv in parts) * kv_heads * kind.head_dim_qk
        if products < 2**39 and keys < 2**29:
            found.append((kind, tuple(parts)))
    return found


def per_request(lengths: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of queries and of keys of every request, int32."""
    rows = [(qo, kv) for count, qo, kv in lengths for _ in range(count)]
    qo_lens, kv_lens = torch.tensor(rows, dtype=torch.int32).T
    return qo_lens, kv_lens


def starts(lens: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1), lens.cumsum(0)]).int()


def mask_of(
    mask: str, qo_lens: torch.Tensor, kv_lens: torch.Tensor, device: torch.device
) -> dict[str, Any]:
    """Options of plan: a random mask of half of all keys, or items of 64 tokens after a prefix."""
    if mask == "custom":
        bits = int((qo_lens.long() * kv_lens).sum())
        return {"custom_mask": torch.rand(bits, device=device) < 0.5}
    if mask == "items":
        most = int(qo_lens.max())
        positions = torch.arange(most, device=device, dtype=torch.int16) % 64
        return {
            "prefix_len_ptr": (kv_lens - qo_lens).to(device),
            "token_pos_in_items_ptr": positions.repeat(len(qo_lens)),
            "token_pos_in_items_len": most,
            "max_item_len_ptr": torch.full((len(qo_lens),), 63, dtype=torch.int16, device=device),
        }
    return {}


def planned(shape: Shape, backend: str, workspace: torch.Tensor) -> Any:
    """A wrapper after its plan, with every page in a random place."""
    if backend == APART:
        with mock.patch.object(mixed, "_is_faster_apart", return_value=True):
            return planned(shape, "auto", workspace)
    kind, lengths = shape
    qo_lens, kv_lens = per_request(lengths)
    heads = (kind.qo_heads, kind.kv_heads, kind.head_dim_qk)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": kind.kv_data_type}
    options: dict[str, Any] = dict(causal=kind.causal, **dtypes)
    if not kind.mixed:
        options |= {"head_dim_vo": kind.head_dim_vo, "window_left": kind.window_left}
        options["logits_soft_cap"] = 30.0 if kind.capped else 0.0
        options["pos_encoding_mode"] = "ALIBI" if kind.alibi else "NONE"
    options |= mask_of(kind.mask, qo_lens, kv_lens, workspace.device)
    if kind.page_size == 0:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
        wrapper.plan(starts(qo_lens), starts(kv_lens), *heads, **options)
        return wrapper
    counts = (kv_lens + kind.page_size - 1) // kind.page_size
    order = torch.randperm(int(counts.sum()), generator=torch.Generator().manual_seed(0))
    table = (starts(qo_lens), starts(counts), order.int().to(workspace.device))
    if kind.mixed:
        batch = flashinfer.BatchAttention(device=str(workspace.device), backend=backend)
        sizes = (*heads, kind.head_dim_vo, kind.page_size)
        batch.plan(*table, kv_lens, *sizes, **options)
        return batch
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
    last = kv_lens - (counts - 1) * kind.page_size
    paged.plan(*table, last, *heads, kind.page_size, **options)
    return paged


def is_mixed(shape: Shape) -> bool:
    """Whether some requests decode and others do not, in one batch."""
    kind, lengths = shape
    rows = [qo * kind.qo_heads // kind.kv_heads for _, qo, _ in lengths]
    return kind.mixed and min(rows) <= mixed.DECODE_ROWS < max(rows)


def taken(wrapper: Any) -> str:
    """The kernel that a plan launches: ``"fa2"``, ``"fa3"`` or one launch of each."""
    executor = wrapper._executor
    return APART if getattr(executor, "_is_apart", False) else executor.config.backend


def compile_all(shapes: list[Shape]) -> None:
    """The modules of all plans at once, with every core; plans on the CPU say which these are."""
    configs: set[AttentionConfig] = set()
    with flashinfer.reference_backend():
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8)
        for shape in shapes:
            for backend in FORCED:
                configs.add(planned(shape, backend, workspace)._executor.config)
            if is_mixed(shape):
                configs.add(planned(shape, APART, workspace)._executor._decoder.config)
    print(f"{len(shapes)} shapes, {len(configs)} modules", flush=True)
    build_jit_specs([gen_attention_module(config) for config in configs])


def tensors(shape: Shape) -> list[dict[str, Any]]:
    """The arguments of the runs that take turns."""
    kind, lengths = shape
    qo_lens, kv_lens = per_request(lengths)

    def make(*sizes: int, dtype: torch.dtype = kind.kv_data_type) -> torch.Tensor:
        return make_tensor(*sizes, dtype=dtype, device="cuda")

    q = make(int(qo_lens.sum()), kind.qo_heads, kind.head_dim_qk, dtype=torch.bfloat16)
    out = torch.empty_like(q[..., : kind.head_dim_vo]).contiguous()
    rows: tuple[int, ...] = (int(kv_lens.sum()), kind.kv_heads)
    if kind.page_size:
        pages = int(((kv_lens + kind.page_size - 1) // kind.page_size).sum())
        rows = (pages, kind.page_size, kind.kv_heads)
    k, v = make(*rows, kind.head_dim_qk), make(*rows, kind.head_dim_vo)
    copies = min(MOST_RUNS, -(-COLD_BYTES // (k.nbytes + v.nbytes)))
    pairs = [(k, v), *((k.clone(), v.clone()) for _ in range(copies - 1))]
    if kind.mixed:
        return [{"q": q, "kv_cache": pair, "out": out} for pair in pairs]
    if kind.page_size:
        return [{"q": q, "paged_kv_cache": pair, "out": out} for pair in pairs]
    return [{"q": q, "k": pair[0], "v": pair[1], "out": out} for pair in pairs]


def captured(wrapper: Any, arguments: list[dict[str, Any]], count: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # on which the plan is on its way
    with torch.cuda.stream(stream):
        wrapper.run(**arguments[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            wrapper.run(**arguments[i % len(arguments)])
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
    names = (*BACKENDS, APART) if is_mixed(shape) else BACKENDS
    wrappers = {name: planned(shape, name, workspaces[name]) for name in names}
    single_us = elapsed_us(captured(wrappers["fa2"], arguments, 1))
    count = max(1, min(MOST_RUNS, int(ROUND_US / single_us)))
    graphs = {name: captured(w, arguments, count) for name, w in wrappers.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for graph in graphs.values():
        graph.replay()
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(elapsed_us(graph) / count)
    us = {name: statistics.median(found) for name, found in times.items()}
    kind, lengths = shape
    flops = attention_flops_with_actual_seq_lens(
        *per_request(lengths), kind.head_dim_qk, kind.head_dim_vo, kind.qo_heads, kind.causal
    )
    return {
        **dataclasses.asdict(kind),
        "lengths": [list(part) for part in lengths],
        "us": us,
        "tflops": {name: flops / time * 1e-6 for name, time in us.items()},
        "auto": taken(wrappers["auto"]),
        "auto_behind": us["auto"] / min(us[name] for name in names if name != "auto"),
    }


HEADERS = (
    *("wrapper", "heads", "head sizes", "keys", "mask", "window", "requests x queries x keys"),
    *(*(f"{name} us" for name in (*BACKENDS, APART)), "fa3 TFLOP/s", "fa2 / fa3", "auto took"),
)


def table(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """`HEADERS` of every row."""
    return [
        [
            "BatchAttention" if r["mixed"] else "prefill",
            f"{r['qo_heads']}/{r['kv_heads']}",
            f"{r['head_dim_qk']}/{r['head_dim_vo']}",
            (f"page {r['page_size']}" if r["page_size"] else "ragged")
            + (f" {r['kv_dtype']}" if r["kv_dtype"] != "bfloat16" else ""),
            " ".join(
                ["causal" if r["causal"] else "full"]
                + [name for name in ("capped", "alibi") if r.get(name)]
                + [r["mask"]] * bool(r.get("mask"))
            ),
            r["window_left"],
            " + ".join("x".join(map(str, part)) for part in r["lengths"]),
            *(round(r["us"][name], 2) if name in r["us"] else "" for name in (*BACKENDS, APART)),
            round(r["tflops"]["fa3"], 1),
            round(r["us"]["fa2"] / r["us"]["fa3"], 3),
            r["auto"],
        ]
        for r in rows
    ]


def read(path: Path) -> list[tuple[Shape, dict[str, float]]]:
    """Shapes and microseconds by kernel of a CSV that `main` wrote."""
    found = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            words = row["keys"].split()  # "ragged" or "page 16", and perhaps a dtype
            qo_heads, kv_heads = map(int, row["heads"].split("/"))
            head_dim_qk, head_dim_vo = map(int, row["head sizes"].split("/"))
            mask = row["mask"].split()  # "causal" or "full", and perhaps options
            kind = Kind(
                *(qo_heads, kv_heads, head_dim_qk, head_dim_vo),
                page_size=int(words[1]) if words[0] == "page" else 0,
                causal=mask[0] == "causal",
                window_left=int(row["window"]),
                mixed=row["wrapper"] == "BatchAttention",
                kv_dtype=words[-1] if "float" in words[-1] else "bfloat16",
                capped="capped" in mask,
                alibi="alibi" in mask,
                mask=next((name for name in ("custom", "items") if name in mask), ""),
            )
            parts = row["requests x queries x keys"].split(" + ")
            qo_kv = [tuple(map(int, part.split("x"))) for part in parts]
            lengths = tuple((count, qo, kv) for count, qo, kv in qo_kv)
            us = {name: row[f"{name} us"] for name in (*FORCED, APART) if row.get(f"{name} us")}
            found.append(((kind, lengths), {name: float(value) for name, value in us.items()}))
    return found


def write(file: Any, rows: list[dict[str, Any]]) -> None:
    """The table of the forced kernels, as CSV."""
    kept = [i for i, name in enumerate(HEADERS) if "auto" not in name]
    lines = [HEADERS, *table(rows)]
    csv.writer(file).writerows([line[i] for i in kept] for line in lines)


def report(rows: list[dict[str, Any]]) -> str:
    """All shapes, then the shapes where ``auto`` is slower."""
    behind = [r for r in rows if r["auto_behind"] > ALLOWED]
    # The same kernel twice differs by noise; another kernel is a rule that is wrong.
    wrong = [r for r in behind if r["us"][r["auto"]] > ALLOWED * min(r["us"].values())]
    worst = max(r["auto_behind"] for r in rows)
    parts = [tabulate(table(rows), headers=HEADERS, floatfmt=".4g")]
    if behind:
        parts.append("behind:\n" + tabulate(table(behind), headers=HEADERS, floatfmt=".4g"))
    parts.append(
        f"auto is over {ALLOWED:.2f} times the better kernel in {len(behind)} of {len(rows)}"
        f" shapes ({len(wrong)} by its choice); at worst {worst:.3f} times"
    )
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="JSON file for the results")
    parser.add_argument("--csv", type=Path, help="file for the table, of both kernels")
    parser.add_argument("--random", type=int, help="draw this many shapes in place of the grid")
    parser.add_argument("--seed", type=int, default=1, help="of the shapes that are drawn")
    parser.add_argument("--part", default="1/1", help="such as 2/4: every fourth shape")
    parser.add_argument("--seconds", type=float, help="begin no shape after this time")
    arguments = parser.parse_args()
    begun = time.monotonic()
    if not backends.is_hopper(torch.device("cuda", 0)):
        print("needs a GPU of compute capability 9.0")
        return 3
    number, parts = map(int, arguments.part.split("/"))
    shapes = SHAPES if arguments.random is None else random_shapes(arguments.random, arguments.seed)
    shapes = shapes[number - 1 :: parts]
    compile_all(shapes)
    print(f"compiled after {time.monotonic() - begun:.1f} s", flush=True)
    workspaces = {
        name: torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        for name in (*BACKENDS, APART)
    }
    order = list(range(len(shapes)))
    random.Random(0).shuffle(order)  # so that what time leaves out is a bit of everything
    found = {}
    for index in order:
        if arguments.seconds is not None and time.monotonic() - begun > arguments.seconds:
            break
        found[index] = measured(shapes[index], workspaces)
    rows = [found[index] for index in sorted(found)]
    facts = {"device": torch.cuda.get_device_name(), "flashinfer": flashinfer.__version__}
    arguments.output.write_text(json.dumps({**facts, "shapes": rows}, indent=1))
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            write(file, rows)
    print(report(rows))
    print(f"{len(rows)} of {len(shapes)} shapes, {time.monotonic() - begun:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
