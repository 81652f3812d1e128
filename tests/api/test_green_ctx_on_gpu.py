"""Operations on partitions of a GPU, several at once, give the results of the whole GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashinfer
from flashinfer import green_ctx
from flashinfer._common import driver
from flashinfer._common.driver import get_stream_sm_count

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
COUNTS = [16, 32]


@pytest.fixture(scope="module")
def parts() -> tuple[list, list[int]]:
    """Streams on 16 and 32 multiprocessors and on the rest, and how many each has."""
    torch.cuda.init()
    if not hasattr(driver._library(), "cuGreenCtxStreamCreate"):
        pytest.skip("needs a driver of CUDA 12.5 or later")
    streams, resources = green_ctx.split_device_green_ctx_by_sm_count(DEVICE, COUNTS)
    return streams, [resource.sm.smCount for resource in resources]


def test_partitions_have_what_was_asked_for(parts):
    streams, counts = parts
    assert counts[:2] == COUNTS
    assert sum(counts) == get_stream_sm_count(DEVICE) == flashinfer.utils.get_device_sm_count(0)
    for stream, count in zip(streams, counts, strict=True):
        with torch.cuda.stream(stream):
            assert get_stream_sm_count(DEVICE) == count
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        assert get_stream_sm_count(DEVICE) == sum(counts)


def operations() -> dict[str, Callable[[], torch.Tensor]]:
    generator = torch.Generator(DEVICE).manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    x, weight, b = random(512, 4096), random(4096), random(1024, 4096)
    q, k, v = random(600, 8, 128), random(600, 2, 128), random(600, 2, 128)
    one = random(8, 128)
    return {
        "norm": lambda: flashinfer.rmsnorm(x, weight),
        "product": lambda: flashinfer.mm_bf16(x, b.t(), backend="auto"),
        "decode": lambda: flashinfer.single_decode_with_kv_cache(one, k, v),
        "prefill": lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True),
    }


def test_results_are_those_of_the_whole_gpu(parts):
    streams, _ = parts
    calls = operations()
    expected = {name: call() for name, call in calls.items()}
    torch.cuda.synchronize()
    names = list(calls)
    for shift in range(len(streams)):  # each operation on each partition, three at once
        found = {}
        for index, stream in enumerate(streams):
            name = names[(index + shift) % len(names)]
            with torch.cuda.stream(stream):
                found[name] = calls[name]()
        torch.cuda.synchronize()
        for name, result in found.items():
            if name == "norm":
                assert torch.equal(result, expected[name])
            else:
                torch.testing.assert_close(result, expected[name], rtol=2e-2, atol=2e-2)
