"""Hyper-connections on the CPU, against double precision: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator

__all__ = ["emulator"]  # a fixture

PRE, POST = "flashinfer/mhc/mhc_pre.cuh", "flashinfer/mhc/mhc_post.cuh"


def find_fault(emulator: Emulator, full: bool) -> str:
    """What the emulation says; empty if all is right."""
    program = emulator.build("mhc_emulation.cc", ["-DEMULATION_ARCH=900"])
    done = emulator.call([program, "40" if full else "10"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_tokens(emulator: Emulator, full: bool) -> None:
    assert not find_fault(emulator, full)


@pytest.mark.parametrize(
    ("header", "statement", "other", "message"),
    [
        (PRE, "inv_row[i] *= eps;", "inv_row[i] = eps;", "comb_mix"),
        pytest.param(
            *(POST, "comb[m][n] * values[i]", "comb[n][m] * values[i]", "stream"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(PRE, "if (column != first) columns.load", "if (false) columns.load", "layer_input"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(PRE, "gate + params.pre_eps", "gate", "layer_input"), marks=pytest.mark.full
        ),
    ],
)
def test_the_emulation_notices(
    emulator: Emulator, full: bool, header: str, statement: str, other: str, message: str
) -> None:
    emulator.substitute(header, statement, other)
    assert message in find_fault(emulator, full)
