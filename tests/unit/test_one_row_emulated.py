"""Products of one row on the CPU, against double precision: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator

__all__ = ["emulator"]  # a fixture

HEADER = "flashinfer/gemm/one_row.cuh"


def find_fault(emulator: Emulator, full: bool) -> str:
    """What the emulation says; empty if all is right."""
    emulator.substitute(HEADER, "extern __shared__ __align__(128) char shared[];", "")
    emulator.substitute(HEADER, "(shared);", "(dynamic_shared);")
    program = emulator.build("one_row_emulation.cc", ["-DEMULATION_ARCH=900"])
    done = emulator.call([program, "100" if full else "10"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_products(emulator: Emulator, full: bool) -> None:
    assert not find_fault(emulator, full)


@pytest.mark.parametrize(
    ("statement", "other"),
    [
        ("if (at < there) x.load", "x.load"),
        ("total[e] += __shfl_xor_sync(", "total[e] = __shfl_xor_sync("),
    ],
)
def test_the_emulation_notices(emulator: Emulator, full: bool, statement: str, other: str) -> None:
    emulator.substitute(HEADER, statement, other)
    assert "column" in find_fault(emulator, full)
