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
    ("header", "statement", "other"),
    one_by_default(
        [
            ("soft_cap.h", "0.115442269f", "0.1145f"),
            ("math.cuh", "0.916096747f", "0.9163f"),
            ("math.cuh", "copysignf(fmaf(e, far, 1.f), x)", "fmaf(e, far, 1.f)"),
        ]
    ),
)
def test_faults_are_found(emulator: Emulator, header: str, statement: str, other: str) -> None:
    emulator.substitute(f"flashinfer/attention/{header}", statement, other)
    assert "exit status" in find_fault(emulator)
