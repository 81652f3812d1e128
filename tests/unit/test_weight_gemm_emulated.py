"""Products with weights of 4 and 8 bits, in groups, on the CPU: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

KERNEL = "flashinfer/gemm/portable/kernel.cuh"
STREAM = "flashinfer/gemm/sm90/weight_kernel.cuh"
PRODUCER = "flashinfer/gemm/sm90/weight_producer.cuh"
CONSUMER = "flashinfer/gemm/sm90/weight_consumer.cuh"
TILES = "flashinfer/gemm/sm90/weight_tile.cuh"
TILE, PAIRS = "flashinfer/gemm/portable/tile.cuh", "flashinfer/common/float4_pairs.cuh"


def find_fault(emulator: Emulator, full: bool) -> str:
    """What the emulation says; empty if all is right."""
    shared = "extern __shared__ __align__(128) char memory[];"
    emulator.substitute(KERNEL, shared, "char* const memory = dynamic_shared;")
    program = emulator.build("weight_gemm_emulation.cc", ["-DEMULATION_ARCH=800"])
    done = emulator.call([program, "40" if full else "3"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_products(emulator: Emulator, full: bool) -> None:
    assert not find_fault(emulator, full)


@pytest.mark.parametrize(
    ("header", "statement", "other"),
    one_by_default(
        [
            (KERNEL, "    find_rows();\n    __syncthreads();\n", "    find_rows();\n"),
            (KERNEL, "ptx::cp_async_wait<kStages - 2>();", "ptx::cp_async_wait<kStages - 1>();"),
            (KERNEL, "scales + min(first + j, last)", "scales + min(first, last)"),
            (TILE, "before >= n;", "before > n;"),
            (PAIRS, "(right & 0x003c003cu) * 0x0410u", "(right & 0x003c003cu) * 0x0420u"),
        ]
    ),
)
def test_faults_are_found(emulator: Emulator, header: str, statement: str, other: str) -> None:
    emulator.substitute(header, statement, other)
    assert find_fault(emulator, False)


PERSISTENT, ONCE = "weight_stream_emulation.cc", "weight_once_emulation.cc"


def find_stream_fault(emulator: Emulator, full: bool, program: str = PERSISTENT) -> str:
    """The same for the kernel that streams weights on Hopper."""
    shared = "extern __shared__ __align__(1024) char memory[];"
    emulator.substitute(STREAM, shared, "char* const memory = dynamic_shared;")
    built = emulator.build(program, ["-DEMULATION_ARCH=800"])
    done = emulator.call([built, "20" if full else "2"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


@pytest.mark.parametrize("program", [PERSISTENT, ONCE])
def test_random_streams(program: str, emulator: Emulator, full: bool) -> None:
    assert not find_stream_fault(emulator, full, program)


@pytest.mark.parametrize(
    ("header", "statement", "other"),
    one_by_default(
        [
            (CONSUMER, "        ptx::mbarrier_wait(full, ring.phase);\n", ""),
            (CONSUMER, "        if (stages_.begins_box(i)) ring.advance_box();\n", ""),
            (CONSUMER, "ptx::named_barrier_sync(1 + slice_, kPair);\n    constexpr", "constexpr"),
            (PRODUCER, "        ptx::mbarrier_wait(empty(ring.stage), ring.phase ^ 1);\n", ""),
            (
                PRODUCER,
                "Tile::kStageBytes + (begins_box ? Tile::kScaleBytes : 0)",
                "Tile::kStageBytes + Tile::kScaleBytes",
            ),
        ]
    ),
)
def test_faults_of_streams_are_found(
    emulator: Emulator, header: str, statement: str, other: str
) -> None:
    emulator.substitute(header, statement, other)
    assert find_stream_fault(emulator, False)


@pytest.mark.parametrize(
    ("header", "statement", "other"),
    one_by_default(
        [
            (TILES, "Tile::kTeams > 1 || i == 0", "i == 0"),
            (PRODUCER, "      ptx::mbarrier_wait_soon(empty(ring.stage), ring.phase ^ 1);\n", ""),
            (CONSUMER, "t_ / 2 * 2) ^ (line & 7)", "t_ / 2 * 2) ^ (token & 7)"),
            (CONSUMER, "    ptx::named_barrier_sync(1 + team_, Tile::kTeamWarps * 32);\n", ""),
            (CONSUMER, "ptx::named_barrier_sync(1 + Tile::kTeams, Tile::kWarps * 32);", ""),
        ]
    ),
)
def test_faults_of_tiles_visited_once_are_found(
    emulator: Emulator, header: str, statement: str, other: str
) -> None:
    emulator.substitute(header, statement, other)
    assert find_stream_fault(emulator, False, ONCE)
