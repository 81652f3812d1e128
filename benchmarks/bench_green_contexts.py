"""Speed of operations on partitions of a GPU, alone and several at once.

python benchmarks/bench_green_contexts.py

Per operation and partition: microseconds, and the speed times all multiprocessors over those of the
partition, against the whole GPU (1 is proportional; what memory bounds gets more). Then several
operations at once on partitions, against all of them in turn on the whole GPU. Results are compared
with those of the whole GPU first.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
from harness import gpu_complaint

import flashinfer
from flashinfer.green_ctx import split_device_green_ctx_by_sm_count

DEVICE = torch.device("cuda:0")
ROUNDS = 20
Call = Callable[[], torch.Tensor]  # gives its result
COUNTS = (16, 32, 64, 96)
TOGETHER = (  # multiprocessors of all but the last operation, which gets the rest
    ((64,), ("product 8192^3", "decode 64x2048, 32/8 heads")),
    ((64,), ("norm 8192x8192", "product 8192^3")),
    ((64,), ("prefill 4096, 32/8 heads", "decode 64x2048, 32/8 heads")),
    ((64,), ("prefill 4096, 32/8 heads", "latent decode 64x4096, 16 heads")),
    ((48, 48), ("prefill 4096, 32/8 heads", "product 8192^3", "norm 8192x8192")),
)


def microseconds(work: dict[torch.cuda.Stream, Call]) -> float:
    """Time of a round of calls, each on its stream, from the first start to the last end."""
    current = torch.cuda.current_stream()
    for stream, call in work.items():
        with torch.cuda.stream(stream):
            call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)  # the host queues all calls meanwhile
    start.record()
    for stream, call in work.items():
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(ROUNDS):
                call()
    for stream in work:
        current.wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / ROUNDS


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def decode_planner(batch: int = 64, length: int = 2048, page: int = 16) -> Callable[[], Call]:
    """Attention of a token of each request over a paged cache."""
    cache = random(batch * length // page, 2, page, 8, 128)
    indptr = torch.arange(batch + 1, dtype=torch.int32) * (length // page)
    indices = torch.arange(int(indptr[-1]), dtype=torch.int32, device=DEVICE)
    last = torch.full((batch,), page, dtype=torch.int32)
    queries = random(batch, 32, 128)
    out = torch.empty_like(queries)

    def plan() -> Call:
        workspace = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        wrapper.plan(indptr, indices, last, 32, 8, 128, page, **types)
        return lambda: wrapper.run(queries, cache, out=out)

    return plan


def latent_planner(batch: int = 64, length: int = 4096, page: int = 64) -> Callable[[], Call]:
    """Latent attention of a token of each request over a paged cache."""
    ckv, kpe = (random(batch * length // page, page, size) for size in (512, 64))
    q_nope, q_pe = random(batch, 16, 512), random(batch, 16, 64)
    indptr = torch.arange(batch + 1, dtype=torch.int32)
    pages = torch.arange(batch * length // page, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    out = torch.empty_like(q_nope)

    def plan() -> Call:
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace)
        table = indptr, indptr * (length // page), pages, lengths
        types = torch.bfloat16, torch.bfloat16
        wrapper.plan(*table, 16, 512, 64, page, False, 192**-0.5, *types)
        return lambda: wrapper.run(q_nope, q_pe, ckv, kpe, out=out)

    return plan


def operations() -> dict[str, Callable[[], Call]]:
    """Functions that plan for the current stream, by name."""
    x, weight, b = random(8192, 8192), random(8192), random(8192, 8192)
    out, normed = torch.empty_like(x), torch.empty_like(x)
    q, k, v = random(4096, 32, 128), random(4096, 8, 128), random(4096, 8, 128)

    return {
        "norm 8192x8192": lambda: lambda: flashinfer.rmsnorm(x, weight, out=normed),
        "product 8192^3": lambda: lambda: flashinfer.mm_bf16(x, b.t(), out=out, backend="auto"),
        "prefill 4096, 32/8 heads": lambda: (
            lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
        ),
        "decode 64x2048, 32/8 heads": decode_planner(),
        "latent decode 64x4096, 16 heads": latent_planner(),
    }


def check(work: dict[torch.cuda.Stream, Call], expected: list[torch.Tensor]) -> None:
    """Results of calls at once are those of the whole GPU, but for how sums are cut."""
    for last in (False, True):
        results = []
        for stream, call in work.items():
            with torch.cuda.stream(stream):
                results.append(call())
        torch.cuda.synchronize()
        if not last:
            for result in results:
                result.fill_(float("nan"))
            torch.cuda.synchronize()
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=2e-2, atol=2e-2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    if complaint := gpu_complaint():
        parser.error(complaint)
    plans = operations()
    whole, results = {}, {}
    for name, plan in plans.items():
        call = plan()
        whole[name] = microseconds({torch.cuda.Stream(DEVICE): call})
        results[name] = call().clone()
    total = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    print(torch.cuda.get_device_name(DEVICE), {name: round(us, 1) for name, us in whole.items()})

    @functools.cache
    def partitions(counts: tuple[int, ...]) -> tuple[list, list[int]]:
        streams, resources = split_device_green_ctx_by_sm_count(DEVICE, list(counts))
        return streams, [resource.sm.smCount for resource in resources]

    def planned(counts: tuple[int, ...], names: tuple[str, ...]) -> tuple[dict, list[int]]:
        streams, sizes = partitions(counts)
        work = {}
        for stream, name in zip(streams, names, strict=False):
            with torch.cuda.stream(stream):
                work[stream] = plans[name]()
        check(work, [results[name] for name in names])
        return work, sizes

    for count in COUNTS:
        for name in plans:
            work, (sms, *_) = planned((count,), (name,))
            us = microseconds(work)
            ratio = whole[name] / us * total / sms
            print(f"{sms:4d} SMs  {name:32s} {us:9.1f} us  {ratio:.2f} of proportional")
    for counts, names in TOGETHER:
        work, sizes = planned(counts, names)
        us, turns = microseconds(work), sum(whole[name] for name in names)
        on = "+".join(map(str, sizes))
        print(f"{'; '.join(names)} on {on} SMs: {us:.1f} us, in turn {turns:.1f} us")


if __name__ == "__main__":
    main()
