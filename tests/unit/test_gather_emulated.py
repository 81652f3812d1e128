"""The copy of keys out of pages, emulated on the CPU: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

KERNEL = "flashinfer/attention/gather.cuh"
REQUEST = "flashinfer/attention/request_of.cuh"


def find_fault(emulator: Emulator, cases: int) -> str:
    """What the emulation says; empty if all is right."""
    program = emulator.build("gather_emulation.cc", ["-DEMULATION_ARCH=900"])
    done = emulator.call([program, str(cases * emulator.rounds)])
    return f"exit status {done.returncode}: {done.stdout}" if done.returncode else ""


def test_random_caches(emulator: Emulator) -> None:
    assert not find_fault(emulator, 40)


@pytest.mark.parametrize(
    ("file", "statement", "other"),
    one_by_default(
        [
            (REQUEST, "<= row ? low : high)", "< row ? low : high)"),
            (KERNEL, "to[unit] = units[i];", "to[first] = units[i];"),
            (KERNEL, "row)[in_row] : uint4{};", "row)[unit] : uint4{};"),
            (KERNEL, "number < params.num_pages;", "number <= params.num_pages;"),
        ]
    ),
)
def test_faults_are_found(emulator: Emulator, file: str, statement: str, other: str) -> None:
    emulator.substitute(file, statement, other)
    assert find_fault(emulator, 120)
