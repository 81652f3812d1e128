"""Host time: what the decorators add to a call, and what attention's `plan` and `run` take.

The decorators ``@flashinfer_api`` at level 0 and ``@backend_requirement`` are timed::

    python benchmarks/bench_host_overhead.py [--limit_us 1.5]

The function under the decorators does nothing, so that what is left is the decorator. On a GPU the
compute capability is looked up as well; without one the tensors are on the CPU and it is not. The
variants are timed in turns and the fastest round counts: other processes only ever add time.

``plan`` with lengths on the host and ``run`` are also given as multiples of ``torch.add(a, b,
out=o)``, which depends less on the machine than microseconds do. Without a GPU there is no ``run``,
and ``plan`` copies to the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate

import flashinfer
from flashinfer.api_logging import flashinfer_api
from flashinfer.compat.backends import backend_requirement, supported_compute_capability

CAPABILITIES = [75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121]


def scale(input: Any, factor: Any, out: Any = None) -> Any:
    return out


def attend(q: Any, k: Any, v: Any, backend: str = "auto") -> Any:
    return q


@supported_compute_capability(CAPABILITIES)
def _check_scale(input: Any, factor: Any, out: Any = None) -> bool:
    if out is not None and out.shape != input.shape:
        raise ValueError("out must have the shape of input")
    return True


@supported_compute_capability(CAPABILITIES)
def _check_attend(q: Any, k: Any, v: Any, backend: str) -> bool:
    if q.shape[-1] > 256:
        raise ValueError("head_dim must be at most 256")
    return True


def _rank(suitable_backends: list[str], q: Any, k: Any, v: Any, backend: str) -> list[str]:
    return suitable_backends


def variants(x: torch.Tensor) -> list[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Name, the call without decorators, the same call with them."""
    checked = backend_requirement({}, common_check=_check_scale)(scale)
    both = flashinfer_api(backend_requirement({}, common_check=_check_scale)(scale))
    checks = {"fa2": _check_attend, "fa3": _check_attend}
    attention = backend_requirement(checks, heuristic_func=_rank)(attend)
    level_0 = flashinfer_api(lambda input, factor, out=None: out)
    plain = lambda: scale(x, 2.0)  # noqa: E731
    plain_out = lambda: scale(x, 2.0, out=x)  # noqa: E731
    plain_attend = lambda: attend(x, x, x)  # noqa: E731
    return [
        ("flashinfer_api, level 0", plain, lambda: level_0(x, 2.0)),
        ("backend_requirement", plain, lambda: checked(x, 2.0)),
        ("backend_requirement, out=", plain_out, lambda: checked(x, 2.0, out=x)),
        ("backend_requirement, skip_check", plain, lambda: checked(x, 2.0, skip_check=True)),
        ("flashinfer_api + backend_requirement", plain_out, lambda: both(x, 2.0, out=x)),
        ("one of two backends", plain_attend, lambda: attention(x, x, x, "fa3")),
        ("two backends, auto", plain_attend, lambda: attention(x, x, x)),
    ]


def fastest_us(calls: list[Callable[[], Any]], rounds: int, number: int) -> list[float]:
    """Microseconds per call of each, the best of interleaved rounds."""
    timers = [timeit.Timer(call) for call in calls]
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, timer in enumerate(timers):
            best[i] = min(best[i], timer.timeit(number) / number * 1e6)
    return best


class Attention:
    """Wrappers of 32/8 heads of 128 over pages of 16, and the calls to time.

    Keys are few, so that the GPU never keeps the host waiting; the plans that are timed are of
    long requests, of which some are split.
    """

    HEADS = (32, 8, 128)
    TOKENS = 8192

    def __init__(self, device: str) -> None:
        self.device = device
        self.workspace = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        self.add = torch.ones(3, 1024, device=device)

    def _pages(self, batch_size: int, tokens: int) -> tuple[torch.Tensor, ...]:
        count = -(-tokens // 16)
        indptr = torch.arange(batch_size + 1, dtype=torch.int32) * count
        indices = torch.arange(batch_size * count, dtype=torch.int32, device=self.device)
        return indptr, indices, torch.full((batch_size,), (tokens - 1) % 16 + 1, dtype=torch.int32)

    def decode_plan(self, batch_size: int, tokens: int) -> tuple[Any, Callable[[], Any]]:
        """A decode wrapper, and its plan without arguments."""
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace)
        pages, types = self._pages(batch_size, tokens), dict(q_data_type=torch.bfloat16)
        return wrapper, lambda: wrapper.plan(*pages, *self.HEADS, 16, **types)

    def prefill_plan(self, batch_size: int, tokens: int) -> tuple[Any, Callable[[], Any]]:
        """A paged prefill wrapper, and its plan without arguments."""
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace)
        qo_indptr = torch.arange(batch_size + 1, dtype=torch.int32) * tokens
        pages, types = self._pages(batch_size, tokens), dict(q_data_type=torch.bfloat16)
        return wrapper, lambda: wrapper.plan(
            qo_indptr, *pages, *self.HEADS, 16, causal=True, **types
        )

    def mixed_plan(self, batch_size: int, tokens: int) -> Callable[[], Any]:
        """The plan of ``BatchAttention`` for as many requests that decode, and a prompt."""
        wrapper = flashinfer.BatchAttention(device=self.device)
        counts = torch.full((batch_size + 1,), -(-tokens // 16), dtype=torch.int32)
        kv_indptr = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
        indices = torch.arange(int(kv_indptr[-1]), dtype=torch.int32, device=self.device)
        qo_indptr = torch.arange(batch_size + 2, dtype=torch.int32)
        qo_indptr[-1] += tokens - 1
        kv_len = torch.full((batch_size + 1,), tokens, dtype=torch.int32)
        heads, kv_heads, head_dim = self.HEADS
        sizes = (heads, kv_heads, head_dim, head_dim, 16)
        return lambda: wrapper.plan(qo_indptr, kv_indptr, indices, kv_len, *sizes, causal=True)

    def decode_run(self, batch_size: int) -> Callable[[], Any]:
        """`run` after a plan of one page per request."""
        wrapper, plan = self.decode_plan(batch_size, 16)
        plan()
        q = torch.zeros(batch_size, 32, 128, dtype=torch.bfloat16, device=self.device)
        cache = torch.zeros(batch_size, 2, 16, 8, 128, dtype=torch.bfloat16, device=self.device)
        out = torch.empty_like(q)
        return lambda: wrapper.run(q, cache, out=out)

    def calls(self) -> list[tuple[str, Callable[[], Any]]]:
        """Name and call; the first is what the others are compared with."""
        a, b, out = self.add
        found: list[tuple[str, Callable[[], Any]]] = [
            ("torch.add(a, b, out=o)", lambda: torch.add(a, b, out=out))
        ]
        for batch_size in (64, 256):
            name = f"batch {batch_size} x {self.TOKENS}"
            found.append((f"decode plan, {name}", self.decode_plan(batch_size, self.TOKENS)[1]))
        found.append(("prefill plan, batch 64 x 512", self.prefill_plan(64, 512)[1]))
        name = "BatchAttention plan, batch 64 x 1 + 1 x 1024"
        found.append((name, self.mixed_plan(64, 1024)))
        if self.device == "cuda":
            found.append(("decode run, batch 64", self.decode_run(64)))
        return found


def queued_us(calls: list[Callable[[], Any]], rounds: int, number: int) -> list[float]:
    """Host microseconds per call, as `fastest_us`, with an idle GPU before each round."""
    timers = [timeit.Timer(call) for call in calls]
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, timer in enumerate(timers):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[i] = min(best[i], timer.timeit(number) / number * 1e6)
    return best


def report_attention(device: str, rounds: int) -> dict[str, float]:
    """Print the table of `plan` and `run`; returns the multiples of `torch.add` by name."""
    on_gpu = device == "cuda"
    with contextlib.nullcontext() if on_gpu else flashinfer.reference_backend():
        names, calls = zip(*Attention(device).calls(), strict=True)
        for call in calls:
            call()
        # As many as the GPU takes without making the host wait.
        times = queued_us(list(calls), rounds, 200)
    multiples = [time / times[0] for time in times]
    headers = ("call", "host (µs)", "times torch.add")
    print(tabulate(list(zip(names, times, multiples, strict=True)), headers, floatfmt=".2f"))
    return dict(zip(names, multiples, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num_iters", type=int, default=20_000, help="calls per round")
    parser.add_argument("--limit_us", type=float, help="exit with 1 if a decorator adds more")
    args = parser.parse_args()
    x = torch.ones(16, 16, device="cuda" if torch.cuda.is_available() else "cpu")
    cases = variants(x)
    times = fastest_us(
        [call for _, plain, decorated in cases for call in (plain, decorated)],
        args.rounds,
        args.num_iters,
    )
    plain, decorated = times[::2], times[1::2]
    rows = [(name, p, d, d - p) for (name, _, _), p, d in zip(cases, plain, decorated, strict=True)]
    device = torch.cuda.get_device_name() if x.is_cuda else "CPU tensors, no capability look-up"
    print(f"Python {sys.version.split()[0]}, {device}")
    headers = ("call", "undecorated (µs)", "decorated (µs)", "added (µs)")
    print(tabulate(rows, headers, floatfmt=".3f"))
    print()
    report_attention(x.device.type, args.rounds)
    # With "auto" the checks of every backend are part of the work, so it is shown but not judged.
    worst = max(added for name, _, _, added in rows if "auto" not in name)
    return 1 if args.limit_us is not None and worst > args.limit_us else 0


if __name__ == "__main__":
    sys.exit(main())
