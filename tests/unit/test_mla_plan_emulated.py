"""The planner of latent attention for the device on the CPU: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

PLANNER = "flashinfer/mla/plan.cuh"
CASES = 400


def find_fault(emulator: Emulator) -> str:
    """What the emulation says; empty if all is right."""
    program = emulator.build("mla_plan_emulation.cc", ["-DEMULATION_ARCH=900", "-O1"])
    done = emulator.call([program, str(CASES * emulator.rounds)])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_batches(emulator: Emulator) -> None:
    assert not find_fault(emulator)


@pytest.mark.parametrize(
    ("statement", "other"),
    one_by_default(
        [
            ("if (longest[kWhole] <= longest[cut_]) cut_ = kWhole;", "cut_ = kWhole;"),
            ("return before + sum - value;", "return sum - value;"),
            ("item.kv_begin = min(begin, item.kv_end);", "item.kv_begin = 0;"),
            ("(first_slot(places) + part) * lanes + lane", "first_slot(places) * lanes + lane"),
            ("constexpr int kMany = 4;", "constexpr int kMany = -1;"),
        ]
    ),
)
def test_faults_are_found(emulator: Emulator, statement: str, other: str) -> None:
    emulator.substitute(PLANNER, statement, other)
    assert find_fault(emulator)
