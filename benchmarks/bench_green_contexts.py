"""Speed of operations on partitions of a GPU, alone and two at once.

python benchmarks/bench_green_contexts.py

Per operation and partition: microseconds, and the speed times all multiprocessors over those of the
partition, against the whole GPU (1 is proportional; what memory bounds gets more). Then two
operations at once on halves, against both in turn on the whole GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import flashinfer
from flashinfer.green_ctx import split_device_green_ctx_by_sm_count

DEVICE = torch.device("cuda:0")
ROUNDS = 20
Call = Callable[[], object]


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


def operations() -> dict[str, Callable[[], Call]]:
    """By name, a function that plans for the current stream and returns the call."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    x, weight, b = random(8192, 8192), random(8192), random(8192, 8192)
    out, normed = torch.empty_like(x), torch.empty_like(x)
    q, k, v = random(4096, 32, 128), random(4096, 8, 128), random(4096, 8, 128)
    pages, batch, length = 16, 64, 2048
    cache = random(batch * length // pages, 2, pages, 8, 128)
    indptr = torch.arange(batch + 1, dtype=torch.int32) * (length // pages)
    indices = torch.arange(int(indptr[-1]), dtype=torch.int32, device=DEVICE)
    last = torch.full((batch,), pages, dtype=torch.int32)
    queries = random(batch, 32, 128)

    def decode() -> Call:
        workspace = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        wrapper.plan(indptr, indices, last, 32, 8, 128, pages, **types)
        return lambda: wrapper.run(queries, cache)

    return {
        "norm 8192x8192": lambda: lambda: flashinfer.rmsnorm(x, weight, out=normed),
        "product 8192^3": lambda: lambda: flashinfer.mm_bf16(x, b.t(), out=out, backend="auto"),
        "prefill 4096, 32/8 heads": lambda: (
            lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
        ),
        "decode 64x2048, 32/8 heads": decode,
    }


def main() -> None:
    calls = operations()
    whole = {name: microseconds({torch.cuda.Stream(DEVICE): c()}) for name, c in calls.items()}
    total = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    print(torch.cuda.get_device_name(DEVICE), {name: round(us, 1) for name, us in whole.items()})
    for count in (16, 32, 64, 96):
        streams, resources = split_device_green_ctx_by_sm_count(DEVICE, [count])
        sms = resources[0].sm.smCount
        for name, plan in calls.items():
            with torch.cuda.stream(streams[0]):
                call = plan()
            us = microseconds({streams[0]: call})
            ratio = whole[name] / us * total / sms
            print(f"{sms:4d} SMs  {name:28s} {us:9.1f} us  {ratio:.2f} of proportional")
    streams, resources = split_device_green_ctx_by_sm_count(DEVICE, [64])
    pairs = [("product 8192^3", "decode 64x2048, 32/8 heads"), ("norm 8192x8192", "product 8192^3")]
    for pair in pairs:
        work = {}
        for stream, name in zip(streams, pair, strict=False):
            with torch.cuda.stream(stream):
                work[stream] = calls[name]()
        us, turns = microseconds(work), sum(whole[name] for name in pair)
        sizes = "+".join(str(resource.sm.smCount) for resource in resources)
        print(f"{' and '.join(pair)} on {sizes} SMs: {us:.1f} us, in turn {turns:.1f} us")


if __name__ == "__main__":
    main()
