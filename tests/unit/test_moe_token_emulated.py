"""The experts of one token on the CPU, against double precision: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator

__all__ = ["emulator"]  # a fixture

HEADER = "flashinfer/moe/one_token.cuh"


def find_fault(emulator: Emulator, full: bool) -> str:
    """What the emulation says; empty if all is right."""
    for name in ("up_shared", "down_shared"):
        emulator.substitute(HEADER, f"extern __shared__ __align__(128) char {name}[];", "")
        emulator.substitute(HEADER, f"({name});", "(dynamic_shared);")
    program = emulator.build("moe_token_emulation.cc", ["-DEMULATION_ARCH=900"])
    done = emulator.call([program, "60" if full else "6"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_experts(emulator: Emulator, full: bool) -> None:
    assert not find_fault(emulator, full)


@pytest.mark.parametrize(
    ("statement", "other"),
    [
        ("if (at < params.size) x.load", "x.load"),
        ("gate = warp_reduce_sum(gate);", ""),
        ("is_last ? element + warps : element", "element"),
        ("step.weight = choice.weights[number];", "step.weight = 1.f;"),
    ],
)
def test_the_emulation_notices(emulator: Emulator, full: bool, statement: str, other: str) -> None:
    emulator.substitute(HEADER, statement, other)
    assert "element" in find_fault(emulator, full)
