"""Host time of calls in a compiled graph, beside eager calls and ``torch.add``.

    python benchmarks/bench_compiled_calls.py [--calls 64]

A chain of calls is timed eagerly and in one graph of ``torch.compile``; the time of an empty graph
is taken off. On a GPU the kernels are real and nothing waits for them, so that a time is the host's
as long as the GPU keeps up. Without one, stand-ins that do nothing take their place.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate

import flashinfer
from flashinfer.norm import rms

Chain = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def chains(calls: int, device: str) -> dict[str, Chain]:
    """Calls one after the other, each of which takes what the last one has written."""
    weight = torch.ones(64, device=device, dtype=torch.float16)
    cache = torch.zeros(64, 2, 16, 1, 64, device=device, dtype=torch.float16)

    def write(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for _ in range(calls):
            flashinfer.fused_add_rmsnorm(x, residual, weight)
        return x

    def allocate(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for _ in range(calls):
            x = flashinfer.rmsnorm(x, weight)
        return x

    def add_to(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for _ in range(calls):
            torch.add(x, residual, out=x)
        return x

    def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for _ in range(calls):
            x = torch.add(x, residual)
        return x

    wrapper = planned_wrapper(device)

    def decode(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        q = x.view(2, 2, 64)
        for _ in range(calls):
            q = wrapper.run(q, cache)
        return q

    return {
        "torch.add(out=)": add_to,
        "torch.add": add,
        "fused_add_rmsnorm": write,
        "rmsnorm": allocate,
        "decode wrapper, run": decode,
    }


def planned_wrapper(device: str) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    """A plan of two short requests; without a GPU its kernel does nothing."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(8 << 20, dtype=torch.uint8, device=device)
    )
    indices = [torch.tensor(v, dtype=torch.int32) for v in ([0, 1, 2], [0, 1], [9, 9])]
    with flashinfer.reference_backend() if device == "cpu" else contextlib.nullcontext():
        wrapper.plan(*indices, 2, 1, 64, 16, q_data_type=torch.float16)
    if device == "cpu":
        wrapper._executor._run = lambda *args: None
    return wrapper


def fastest_us(call: Callable[[], Any], device: str, rounds: int = 15, number: int = 8) -> float:
    """The fastest round counts: other processes only ever add time."""
    best = float("inf")
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(number):
            call()
        best = min(best, time.perf_counter() - start)
    return best / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=64, help="calls in the chain")
    calls = parser.parse_args().calls
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, residual = (torch.zeros(4, 64, device=device, dtype=torch.float16) for _ in range(2))
    if device == "cpu":
        for table in (rms._rmsnorm, rms._fused_add_rmsnorm):
            table[x.dtype] = lambda *args: None

    empty = torch.compile(lambda x, residual: x, fullgraph=True)
    empty(x, residual)
    overhead = fastest_us(lambda: empty(x, residual), device)
    rows: list[list[Any]] = []
    for name, chain in chains(calls, device).items():
        eager = fastest_us(lambda c=chain: c(x, residual), device) / calls
        if name.startswith("torch"):
            rows.append([name, eager])
            continue
        compiled = torch.compile(chain, fullgraph=True)
        compiled(x, residual)
        whole = fastest_us(lambda c=compiled: c(x, residual), device)
        us = (whole - overhead) / calls
        rows.append([name, eager, us, us / eager])
    print(tabulate(rows, ["call", "eager us", "in a graph us", "ratio"], floatfmt=".2f"))
    print(f"an empty graph: {overhead:.2f} us")


if __name__ == "__main__":
    main()
