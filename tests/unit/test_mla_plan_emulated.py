"""The planner of latent attention for the device on the CPU: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

CASES = 400


def find_fault(emulator: Emulator) -> str:
    """What the emulation says; empty if all is right."""
    program = emulator.build("mla_plan_emulation.cc", ["-DEMULATION_ARCH=900", "-O1"])
    done = emulator.call([program, str(CASES * emulator.rounds)])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_batches(emulator: Emulator) -> None:
    assert not find_fault(emulator)


@pytest.mark.parametrize(
    ("header", "statement", "other"),
    one_by_default(
        [
            ("planner", "if (longest[kWhole] <= longest[cut_]) cut_ = kWhole;", "cut_ = kWhole;"),
            ("planner", "return before + sum - value;", "return sum - value;"),
            ("planner", "item.kv_begin = min(begin, item.kv_end);", "item.kv_begin = 0;"),
            ("planner", "(first_slot(places) + part) * lanes", "first_slot(places) * lanes"),
            ("plan", "constexpr int kMany = 4;", "constexpr int kMany = -1;"),
            ("own_plan", "params_.items[first + rank] =", "params_.items[first] ="),
            ("own_plan", "(is_own ? 1u << kLimitShift : 0)", "(1u << kLimitShift)"),
        ]
    ),
)
def test_faults_are_found(emulator: Emulator, header: str, statement: str, other: str) -> None:
    emulator.substitute(f"flashinfer/mla/{header}.cuh", statement, other)
    assert find_fault(emulator)
