"""The kernels of communication on the CPU, by processes as ranks: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator

__all__ = ["emulator"]  # a fixture

ALL_REDUCE, OUTPUT = "flashinfer/comm/all_reduce.cuh", "flashinfer/comm/row_output.cuh"
INPUT, LAMPORT = "flashinfer/comm/row_input.cuh", "flashinfer/comm/lamport.cuh"
EXCHANGE, DISPATCH = "flashinfer/comm/exchange.cuh", "flashinfer/comm/expert_dispatch.cuh"
COMBINE = "flashinfer/comm/expert_combine.cuh"


def find_fault(emulator: Emulator, source: str, full: bool) -> str:
    """What the emulation says; empty if all is right."""
    program = emulator.build(source, ["-DEMULATION_ARCH=750"])
    done = emulator.call([program, "60" if full else "8"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_calls_of_all_ranks(emulator: Emulator, full: bool) -> None:
    assert not find_fault(emulator, "comm_emulation.cc", full)


def test_random_exchanges_of_experts(emulator: Emulator, full: bool) -> None:
    assert not find_fault(emulator, "expert_emulation.cc", full)


@pytest.mark.full
@pytest.mark.parametrize(
    ("header", "statement", "other", "message"),
    [
        (ALL_REDUCE, "sums = (kRanks - 1) * place_vecs;", "sums = 0;", ""),
        (ALL_REDUCE, "if (r != rank) comm::put_sentinel(address(r));", "", ""),
        (OUTPUT, "const float row_scale = fmaxf(amax, 1e-10f) / code::e4m3::kMax;",
         "const float row_scale = 1.f;", "scale of row"),
        (OUTPUT, "if (vec % kLanes == 0)", "if (false)", "scale of group"),
        (INPUT, "if (static_cast<uint32_t>(permuted) >= params.num_input_rows) continue;",
         "if (permuted < 0) continue;", ""),
        (LAMPORT, "return calls_ & 1u;", "return 0;", ""),
        (EXCHANGE, "rank < peer ? rank : rank - 1", "rank", ""),
        (DISPATCH, "ExpertFlag::kNumTokens) = 0;", "ExpertFlag::kNumTokens) = 1;", "unused place"),
        (DISPATCH, "expert >= first &&", "true &&", ""),
        (COMBINE, "slot >= 0 && comm::is_active(params.active, rank)", "slot >= 0", ""),
        (DISPATCH, "if (peer == 0) header->num_done = 0;", "", ""),
        (COMBINE, "if (rows[rank] == nullptr) continue;", "", ""),
        (COMBINE, "comm::tokens_from(workspace, source)", "1u", "combined"),
    ],
)  # fmt: skip
def test_faults_are_found(
    emulator: Emulator, header: str, statement: str, other: str, message: str
) -> None:
    emulator.substitute(header, statement, other)
    source = "expert_emulation.cc" if header in (DISPATCH, COMBINE) else "comm_emulation.cc"
    fault = find_fault(emulator, source, False)
    assert fault and message in fault
