"""Products of few rows on the CPU, against double precision: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator

__all__ = ["emulator"]  # a fixture

HEADER = "flashinfer/gemm/few_rows.cuh"


def find_fault(emulator: Emulator, full: bool) -> str:
    """What the emulation says; empty if all is right."""
    emulator.substitute(HEADER, "extern __shared__ __align__(128) char shared[];", "")
    emulator.substitute(HEADER, "(shared);", "(dynamic_shared);")
    program = emulator.build("few_rows_emulation.cc", ["-DEMULATION_ARCH=900"])
    done = emulator.call([program, "60" if full else "6"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_products(emulator: Emulator, full: bool) -> None:
    assert not find_fault(emulator, full)


@pytest.mark.parametrize(
    ("statement", "other"),
    [
        ("r * stride + s * span", "r * stride + s * 64"),
        ("static_cast<int64_t>(first + i) * params.m", "static_cast<int64_t>(i) * params.m"),
        ("words[0], words[1], 0x7632", "words[0], words[1], 0x5410"),
    ],
)
def test_the_emulation_notices(emulator: Emulator, full: bool, statement: str, other: str) -> None:
    emulator.substitute(HEADER, statement, other)
    assert "column" in find_fault(emulator, full)
