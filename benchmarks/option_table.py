"""Attention with each option beside the plain call in the same run: what an option costs.

``python benchmarks/flashinfer_benchmark.py --options`` prints the table. Prefill is causal, 4 x
4096 tokens (2 with a custom mask), decode 64 x 4096, 32 query heads, 8 KV heads of 128, bfloat16;
every call is timed alone, as the best of several rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

import flashinfer

Call = Callable[[], Any]
BF16 = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROUNDS, CALLS = 5, 4
WORKSPACE_BYTES = 384 << 20


class Option(NamedTuple):
    """A row: how the call is made, and with what it is compared.

    Attributes
    ----------
    kind : str
        A key of ``MAKERS``.
    plan : dict
        Options of ``plan``.
    make : dict
        Arguments of the maker.
    """

    kind: str
    plan: dict[str, Any]
    make: dict[str, Any]


def _prefill(
    device: str,
    plan: dict[str, Any],
    *,
    backend: str = "auto",
    page_size: int = 0,
    batch_size: int = 4,
    length: int = 4096,
    mask: bool = False,
) -> Call:
    starts = torch.arange(batch_size + 1, dtype=torch.int32) * length
    q = torch.randn(batch_size * length, HEADS, HEAD_DIM, device=device, dtype=BF16)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if mask:
        lower = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        plan = {**plan, "custom_mask": lower.flatten().repeat(batch_size)}
    options = {"causal": not mask, "q_data_type": BF16, **plan}
    if page_size == 0:
        k, v = (torch.randn_like(q[:, :KV_HEADS].contiguous()) for _ in range(2))
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
        ragged.plan(starts, starts, HEADS, KV_HEADS, HEAD_DIM, **options)
        return lambda: ragged.run(q, k, v)
    count = length // page_size
    shape = (batch_size * count, 2, page_size, KV_HEADS, HEAD_DIM)
    cache = torch.randn(shape, device=device, dtype=BF16)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
    table = _table(batch_size, count, page_size, device)
    paged.plan(starts, *table, HEADS, KV_HEADS, HEAD_DIM, page_size, **options)
    return lambda: paged.run(q, cache)


def _table(batch_size: int, count: int, page_size: int, device: str) -> tuple[torch.Tensor, ...]:
    indptr = torch.arange(batch_size + 1, dtype=torch.int32) * count
    pages = torch.randperm(batch_size * count).int().to(device)
    return indptr, pages, torch.full((batch_size,), page_size, dtype=torch.int32)


def _decode(device: str, plan: dict[str, Any], *, batch_size: int = 64, length: int = 4096) -> Call:
    page_size = 16
    count = length // page_size
    shape = (batch_size * count, 2, page_size, KV_HEADS, HEAD_DIM)
    cache = torch.randn(shape, device=device, dtype=BF16)
    q = torch.randn(batch_size, HEADS, HEAD_DIM, device=device, dtype=BF16)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace)
    table = _table(batch_size, count, page_size, device)
    wrapper.plan(*table, HEADS, KV_HEADS, HEAD_DIM, page_size, q_data_type=BF16, **plan)
    return lambda: wrapper.run(q, cache)


MAKERS: dict[str, Callable[..., Call]] = {"prefill": _prefill, "decode": _decode}

CAP, ROPE = {"logits_soft_cap": 30.0}, {"pos_encoding_mode": "ROPE_LLAMA"}
WINDOW = {"window_left": 512}
OPTIONS: dict[str, tuple[Option, Option]] = {
    "soft cap": (Option("prefill", CAP, {}), Option("prefill", {}, {})),
    "soft cap, fa2": (
        Option("prefill", CAP, {"backend": "fa2"}),
        Option("prefill", {}, {"backend": "fa2"}),
    ),
    "soft cap, window 512": (
        Option("prefill", {**CAP, **WINDOW}, {}),
        Option("prefill", WINDOW, {}),
    ),
    "soft cap, decode": (Option("decode", CAP, {}), Option("decode", {}, {})),
    "ROPE_LLAMA": (Option("prefill", ROPE, {}), Option("prefill", {}, {})),
    "ROPE_LLAMA, decode": (Option("decode", ROPE, {}), Option("decode", {}, {})),
    "ALIBI": (Option("prefill", {"pos_encoding_mode": "ALIBI"}, {}), Option("prefill", {}, {})),
    "custom mask": (
        Option("prefill", {}, {"mask": True, "batch_size": 2}),
        Option("prefill", {}, {"batch_size": 2}),
    ),
    "custom mask, fa2": (
        Option("prefill", {}, {"mask": True, "batch_size": 2, "backend": "fa2"}),
        Option("prefill", {}, {"batch_size": 2, "backend": "fa2"}),
    ),
    "pages of 1": (Option("prefill", {}, {"page_size": 1}), Option("prefill", {}, {})),
    "pages of 16": (Option("prefill", {}, {"page_size": 16}), Option("prefill", {}, {})),
}


def best_us(call: Call) -> float:
    """Microseconds of a call on the GPU, the best of several rounds."""
    call()
    best = float("inf")
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        best = min(best, 1e3 * begin.elapsed_time(end) / CALLS)
    return best


def print_options(device: str = "cuda", time_call: Callable[[Call], float] = best_us) -> None:
    """Print the table.

    Parameters
    ----------
    device : str
        Where the calls run.
    time_call : callable
        Microseconds of a call.
    """
    rows = []
    for name, pair in OPTIONS.items():
        times = [time_call(MAKERS[o.kind](device, o.plan, **o.make)) for o in pair]
        rows.append((name, times[1], times[0], times[0] / times[1]))
    headers = ("option", "plain, us", "with it, us", "ratio")
    print(tabulate(rows, headers, floatfmt=("", ".0f", ".0f", ".2f")))
