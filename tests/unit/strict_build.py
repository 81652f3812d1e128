"""Builds with warnings as errors, and what is wrong with the result; all of it is for import.

They go to the cache of the run like all others: what was built of the same content with the same
flags is not built again.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator

import pytest

from flashinfer.jit import JitSpec, current_compilation_context
from flashinfer.jit.binary import read_kernels

# Kernels that may use stack, with the reason: what they index at run time, or why a spill is the
# lesser evil.
MAY_USE_STACK = {
    "all_reduce_one_shot_kernel": "one trip to memory polls eight ranks, whose vectors take all"
    " registers: 16 bytes on sm_86",
    "attention_kernel": "128 rows take all registers; what is spilled waits for the end of the loop"
    " over keys (test_attention_compile.py looks into it)",
    "chunk_channel_transform_kernel": "150 bytes at most: two CTAs an SM leave 128 registers",
    "chunk_scan_kernel": "40 bytes on sm_90a where four warps take all registers, while they ask"
    " for the next chunk; never where they multiply",
    "chunk_transform_kernel": "up to 56 bytes: four CTAs of 128 threads leave 128 registers",
    "hopper_attention_kernel": "the addresses of a producer that serves every kind of page; never"
    " where it multiplies (test_attention_hopper_compile.py)",
    "mla_sm90_kernel": "up to 64 bytes of the warps that widen caches of 8 bits; none with caches"
    " of 16 bits (test_mla_compile.py)",
    "moe_map_kernel": "8 bytes on sm_100a, where CTAs of 1024 threads leave 64 registers",
    "rope_kernel": "16 bytes on sm_90a where angles are computed, in the fastest form measured",
    "softmax_cluster_kernel": "8 bytes on sm_90a buy a fifth CTA per SM, 3 % of its time",
    "settle_kernel": "16 bytes on sm_75, in the search for a token that was replaced",
    "propose_kernel": "up to 40 bytes on sm_75, where two CTAs of 512 threads leave 64 registers",
    "segment_packbits_kernel": "up to 16 bytes on sm_80 to sm_89, where nvcc stops at 48 registers",
    "top_k_choose_kernel": "up to 40 bytes: two CTAs of 512 threads leave 64 registers",
    "weight_gemm_kernel": "80 bytes on sm_103a for tiles of 64 tokens, whose time there nobody has"
    " measured",
    "weight_stream_kernel": "8 bytes with 16 tokens and k split, outside of the loop: 17 warps"
    " leave 96 registers",
}


@pytest.fixture
def strict_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Warnings are errors."""
    monkeypatch.setenv(
        "FLASHINFER_EXTRA_CUDAFLAGS", "-Werror all-warnings -Xcompiler=-Wall,-Wextra"
    )
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-Wall -Wextra -Werror")
    monkeypatch.setenv("MAX_JOBS", "2")
    current_compilation_context.reset()
    yield monkeypatch
    current_compilation_context.reset()


def most_memory() -> int:
    """Bytes that a compiler may take: 1 GiB, or what this process takes, if that is more.

    A compiler begins as a copy of this process, whose memory counts as its own.
    """
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(2**30, own + 2**26)


def build_and_measure(spec: JitSpec) -> int:
    """Build in a fork of this process; the memory of its largest compiler in bytes."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def build() -> None:
        spec.build()
        sender.send(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)

    process = context.Process(target=build)
    process.start()
    process.join()
    assert process.exitcode == 0, "the build failed; its message is above"
    return receiver.recv()


def spills(spec: JitSpec) -> list[str]:
    """Kernels of a built module that use stack, in words."""
    kernels = read_kernels(spec.get_library_path())
    return [
        f"{spec.name}: {k.short_name} {k.arch}: {k.stack_bytes} bytes"
        for k in kernels
        if k.stack_bytes and k.short_name not in MAY_USE_STACK
    ]
