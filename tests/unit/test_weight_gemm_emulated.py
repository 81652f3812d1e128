"""Products with weights of 4 and 8 bits, in groups, on the CPU: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

KERNEL = "flashinfer/gemm/portable/kernel.cuh"
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
            (PAIRS, "p % 2 ? 0x0104u : 0x1040u", "p % 2 ? 0x0104u : 0x1020u"),
        ]
    ),
)
def test_faults_are_found(emulator: Emulator, header: str, statement: str, other: str) -> None:
    emulator.substitute(header, statement, other)
    assert find_fault(emulator, False)
