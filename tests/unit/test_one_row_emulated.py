"""Products of one row on the CPU, against double precision: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

HEADER = "flashinfer/gemm/one_row.cuh"
HEADS, ROUTE = "flashinfer/gemm/one_row_heads.cuh", "flashinfer/gemm/one_row_route.cuh"
ROPE = "flashinfer/rope/rope.cuh"


def find_fault(emulator: Emulator, full: bool) -> str:
    """What the emulation says; empty if all is right."""
    emulator.substitute(HEADER, "extern __shared__ __align__(128) char shared[];", "")
    emulator.substitute(HEADER, "(shared);", "(dynamic_shared);")
    emulator.substitute(
        ROPE, "extern __shared__ float2 rotations[];", "float2* rotations = nullptr;"
    )
    program = emulator.build("one_row_emulation.cc", ["-DEMULATION_ARCH=900"])
    done = emulator.call([program, "100" if full else "10"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_products(emulator: Emulator, full: bool) -> None:
    assert not find_fault(emulator, full)


@pytest.mark.parametrize(
    ("header", "statement", "other", "message"),
    one_by_default(
        [
            (HEADER, "if (at < there) x.load", "x.load", "column"),
            (HEADER, "total[e] += __shfl_xor_sync(", "total[e] = __shfl_xor_sync(", "column"),
            (HEADS, "lane.slot.page * segment.out", "segment.out", "head"),
            (HEADS, "b[0][j] += lane.bias[1][j];", "", "head"),
            (ROUTE, "threadIdx.x + 32 * i];", "threadIdx.x];", "column"),
        ]
    ),
)
def test_the_emulation_notices(
    emulator: Emulator, full: bool, header: str, statement: str, other: str, message: str
) -> None:
    emulator.substitute(header, statement, other)
    assert message in find_fault(emulator, full)
