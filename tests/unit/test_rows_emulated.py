"""Norms with gates on the CPU, against double precision: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator

__all__ = ["emulator"]  # a fixture

RESIDUAL, GATE = "flashinfer/norm/gated_residual.cuh", "flashinfer/norm/sigmoid_gate.cuh"
MODULATED = "flashinfer/norm/modulated_layernorm.cuh"


def find_fault(emulator: Emulator, full: bool) -> str:
    """What the emulation says; empty if all is right."""
    program = emulator.build("row_emulation.cc", ["-DEMULATION_ARCH=900"])
    done = emulator.call([program, "80" if full else "20"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_rows(emulator: Emulator, full: bool) -> None:
    assert not find_fault(emulator, full)


@pytest.mark.parametrize(
    ("header", "statement", "other", "message"),
    [
        (RESIDUAL, "const Floats stream = residual;", "const Floats& stream = residual;", "stream"),
        (MODULATED, "squares += is_valid ? ", "squares += true ? ", "modulated norm"),
        pytest.param(
            *(RESIDUAL, "params.next_center);", "1.f);", "next norm"), marks=pytest.mark.full
        ),
        pytest.param(
            *(GATE, "row * params.gate_stride", "row * params.input_stride", "gated head"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(MODULATED, "row / params.num_rows * rows.batch_stride", "0", "sum"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_faults_are_found(
    emulator: Emulator, header: str, statement: str, other: str, message: str
) -> None:
    emulator.substitute(header, statement, other)
    assert message in find_fault(emulator, False)
