"""The arithmetic of the soft cap, on the CPU: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture


def find_fault(emulator: Emulator) -> str:
    """What the emulation says; empty if all is right."""
    program = emulator.build("soft_cap_emulation.cc", ["-DEMULATION_ARCH=900"])
    done = emulator.call([program])
    return f"exit status {done.returncode}: {done.stdout}" if done.returncode else ""


def test_the_error_is_what_the_header_says(emulator: Emulator) -> None:
    assert not find_fault(emulator)


@pytest.mark.parametrize(
    ("statement", "other"),
    one_by_default(
        [
            ("0.115442269f", "0.1145f"),
            ("0.916096747f", "0.9163f"),
            ("copysignf(fmaf(e, far, 1.f), x)", "fmaf(e, far, 1.f)"),
        ]
    ),
)
def test_faults_are_found(emulator: Emulator, statement: str, other: str) -> None:
    emulator.substitute("flashinfer/attention/math.cuh", statement, other)
    assert "exit status" in find_fault(emulator)
