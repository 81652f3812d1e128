"""Mamba's states token by token, with replayed rings and at a token of one, emulated on the CPU."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

STEP = "flashinfer/linear_attention/selective_state.cuh"
ONE_STEP = "flashinfer/linear_attention/selective_state_step.cuh"
REPLAY = "flashinfer/linear_attention/state_replay.cuh"
RANGE = "flashinfer/linear_attention/token_range.cuh"


def find_fault(emulator: Emulator, state: str, tied: bool = True, cases: int = 6) -> str:
    """What the emulation says; empty if all is right."""
    for header in (STEP, REPLAY):
        shared = "extern __shared__ __align__(128) char dynamic_shared[];"
        emulator.substitute(header, shared, "")  # the emulation's own has this name
    types = {"dtype": "bfloat16", "state_dtype": state, "dt_dtype": "float32", "a_dtype": "float32"}
    types |= {"weight_dtype": "float32", "dstate": "64", "tied": str(int(tied)), "stochastic": "0"}
    options = [f"-DFLASHINFER_CFG_{name.upper()}={value}" for name, value in types.items()]
    program = emulator.build("state_emulation.cc", ["-DEMULATION_ARCH=900", *options])
    done = emulator.call([program, str(cases * emulator.rounds)])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


@pytest.mark.parametrize(
    ("state", "tied"),
    [
        ("bfloat16", True),
        ("int8", True),
        ("float32", False),
        pytest.param("float32", True, marks=pytest.mark.full),
    ],
)
def test_states(emulator: Emulator, state: str, tied: bool) -> None:
    assert not find_fault(emulator, state, tied)


@pytest.mark.parametrize(
    ("header", "statement", "other"),
    one_by_default(
        [
            (
                STEP,
                "part.store(tokens[threadIdx.x / 32], params);\n    __syncthreads();\n#pragma",
                ";\n#pragma",
            ),
            (REPLAY, "if (begin > 0) __syncthreads();", ""),
            (REPLAY, "replayed + this->range.count > all.window", "replayed >= all.window"),
            (STEP, "t < params.steps && params.intermediate.has(row)", "t < params.steps"),
            (STEP, "return !(is_slot && params.state.has(slot));", "return !is_slot;"),
            (REPLAY, "uint64_t{static_cast<uint32_t>(start)}", "int64_t{start}"),
            (RANGE, "min(end, int64_t{num_tokens})", "end"),
        ]
    ),
)
def test_faults_are_found(emulator: Emulator, header: str, statement: str, other: str) -> None:
    emulator.substitute(header, statement, other)
    assert find_fault(emulator, "float32")


@pytest.mark.parametrize(
    ("statement", "other"),
    one_by_default(
        [
            ("own_dt_x, first_lane + i * kOwners", "own_dt_x, first_lane"),
            ("own_row() < num_rows", "own_row() + 1 < num_rows"),
            ("index != params.pad_slot", "true"),
            ("index < params.num_slots &&", ""),
        ]
    ),
)
def test_faults_of_one_step_are_found(emulator: Emulator, statement: str, other: str) -> None:
    emulator.substitute(ONE_STEP, statement, other)
    assert find_fault(emulator, "bfloat16", cases=24)  # every fourth has one token and takes it
