"""The planner on the device, on the CPU: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

HEADER = "flashinfer/attention/tile_row.cuh"


def find_fault(emulator: Emulator, full: bool) -> str:
    """What the emulation says; empty if all is right."""
    program = emulator.build("device_plan_emulation.cc", ["-DEMULATION_ARCH=900"])
    done = emulator.call([program, "2000" if full else "150"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_lengths(emulator: Emulator, full: bool) -> None:
    assert not find_fault(emulator, full)


@pytest.mark.parametrize(
    ("statement", "other", "message"),
    one_by_default(
        [
            ("last + shift + 1", "last + shift", "keys end"),
            ("if (in.first < column_) item.", "if (false) item.", "part begins"),
            ("is_split ? column_ + totals_", "is_split ? 0 * totals_", "slot"),
            ("if (first < last && cut(first + 1) == 0) ++first;", "", "KV tiles of a part"),
            ("is_even_ = true;", "continue;", "longest of equal parts"),
            ("min(room, int64_t{INT32_MAX})", "int64_t{INT32_MAX}", "lists lead out of bounds"),
        ]
    ),
)
def test_faults_are_found(emulator: Emulator, statement: str, other: str, message: str) -> None:
    emulator.substitute(HEADER, statement, other)
    assert message in find_fault(emulator, False)
