"""Host time of calls in a compiled graph, beside eager calls, with kernels that do nothing.

    python benchmarks/bench_compiled_calls.py [--calls 64]

A chain of calls is timed eagerly and in one graph of ``torch.compile``; the time of an empty graph
is taken off. Kernels are stand-ins, so that what is left is the host's work; `--kernel_us` lets
each stand-in spin, as a launch does. Times are also multiples of ``torch.add``.
"""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate

import flashinfer
from flashinfer.norm import rms


def stand_in(kernel_us: float) -> Callable[..., None]:
    """A kernel that takes this much host time."""

    def kernel(*args: Any) -> None:
        end = time.perf_counter_ns() + 1000 * kernel_us
        while time.perf_counter_ns() < end:
            pass

    return kernel if kernel_us else lambda *args: None


def fastest_us(call: Callable[[], Any], rounds: int = 15, number: int = 50) -> float:
    """The fastest round counts: other processes only ever add time."""
    return min(timeit.repeat(call, repeat=rounds, number=number)) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=64, help="calls in the chain")
    parser.add_argument("--kernel_us", type=float, default=0.0, help="host time of a stand-in")
    args = parser.parse_args()
    x, residual, weight = torch.zeros(4, 64), torch.zeros(4, 64), torch.ones(64)
    for table in (rms._rmsnorm, rms._fused_add_rmsnorm):
        table[x.dtype] = stand_in(args.kernel_us)

    def in_place(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for _ in range(args.calls):
            flashinfer.fused_add_rmsnorm(x, residual, weight)
        return x

    def returned(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        for _ in range(args.calls):
            x = flashinfer.rmsnorm(x, weight)
        return x

    empty = torch.compile(lambda x, residual: x, fullgraph=True)
    empty(x, residual)
    overhead = fastest_us(lambda: empty(x, residual))
    add = fastest_us(lambda: torch.add(x, residual, out=residual))
    rows = []
    for chain in (in_place, returned):
        compiled = torch.compile(chain, fullgraph=True)
        compiled(x, residual)
        eager_us = fastest_us(lambda c=chain: c(x, residual)) / args.calls
        whole = fastest_us(lambda c=compiled: c(x, residual))
        us = (whole - overhead) / args.calls
        rows.append([chain.__name__, eager_us, eager_us / add, us, us / add, us / eager_us])
    print(
        tabulate(rows, ["chain", "eager us", "adds", "graph us", "adds", "ratio"], floatfmt=".2f")
    )
    print(f"torch.add: {add:.2f} us; an empty graph: {overhead:.2f} us")


if __name__ == "__main__":
    main()
