"""Emulates a warp's weights of the attention kernel for Hopper; the rest needs a GPU."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

HEADER = "flashinfer/attention/sm90/weights.cuh"
CAP = "flashinfer/attention/math.cuh"
MOVE = 'asm volatile("mov.b32 %0, %1;" : "=r"(p[step][0][r]) : "r"(ahead[step][0][r]));'


def _find_fault(emulator: Emulator, full: bool) -> str:
    emulator.substitute(HEADER, MOVE, "p[step][0][r] = ahead[step][0][r];")
    program = emulator.build("hopper_weights_emulation.cc", ["-DEMULATION_ARCH=750"])
    done = emulator.call([program, "2000" if full else "400"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_rows_do_not_depend_on_the_warps_other_rows(emulator: Emulator, full: bool) -> None:
    """With fixed splits a request has the same bits in every batch."""
    assert not _find_fault(emulator, full)


def test_rows_that_grow_with_others_are_found(emulator: Emulator) -> None:
    emulator.substitute(HEADER, "!kFirst && row_fits(fits[h])", "false")
    assert "not the same beside other rows" in _find_fault(emulator, False)


@pytest.mark.parametrize(
    ("file", "statement", "other"),
    one_by_default(
        [
            (HEADER, "sum[h] <= most_near(soft_cap, state.largest[0][h]) && fits[h]", "fits[h]"),
            (HEADER, "is_near[h] ? near : any", "any"),
            (HEADER, "has_grown = true;", "has_grown = true; continue;"),
            (HEADER, "is_near[h] = is_near[h] || ", "is_near[h] = "),
            (HEADER, "logit == -math::inf ? logit : exponent", "exponent"),
            (HEADER, "rotate_fragments<2, 2 * kTileSteps>", "rotate_fragments<1, 2 * kTileSteps>"),
        ]
    ),
)
def test_faults_of_the_soft_cap_are_found(
    emulator: Emulator, file: str, statement: str, other: str
) -> None:
    emulator.substitute(file, statement, other)
    assert "capped trial" in _find_fault(emulator, False)


def test_faults_of_few_forms_are_found(emulator: Emulator) -> None:
    emulator.substitute(HEADER, "is_again = true;", "break;")
    assert "few forms trial" in _find_fault(emulator, False)
