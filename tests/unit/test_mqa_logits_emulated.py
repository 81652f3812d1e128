"""The scores of sparse attention, emulated on the CPU: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

KERNEL = "flashinfer/indexer/sm90/mqa_logits.cuh"
PRODUCER = "flashinfer/indexer/sm90/producer.cuh"
WORK = "flashinfer/indexer/sm90/work.cuh"
SCHEDULE = "flashinfer/indexer/schedule.cuh"


def find_fault(emulator: Emulator, heads: int, queries: int, paged: bool, cases: int = 6) -> str:
    """What the emulation says; empty if all is right."""
    shared = "extern __shared__ __align__(1024) char dynamic_shared[];"
    emulator.substitute(KERNEL, shared, "")  # the emulation's own has this name
    options = [f"-DFLASHINFER_CFG_HEADS={heads}", f"-DFLASHINFER_CFG_QUERIES={queries}"]
    options += [
        f"-DFLASHINFER_CFG_PAGED={str(paged).lower()}",
        "-DFLASHINFER_CFG_DTYPE_OUT=float32",
    ]
    program = emulator.build("mqa_logits_emulation.cc", ["-DEMULATION_ARCH=900", *options])
    done = emulator.call([program, str(cases * emulator.rounds)])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


@pytest.mark.parametrize(
    ("heads", "queries", "paged"),
    [
        (64, 1, True),
        (8, 4, False),
        pytest.param(64, 1, False, marks=pytest.mark.full),
        pytest.param(8, 4, True, marks=pytest.mark.full),
    ],
)
def test_random_batches(emulator: Emulator, heads: int, queries: int, paged: bool) -> None:
    assert not find_fault(emulator, heads, queries, paged)


@pytest.mark.parametrize(
    ("header", "statement", "other", "paged"),
    one_by_default([
        (KERNEL, "if (quad_ != query % 4 ||", "if (quad_ != 0 || query % 4 == 1 ||", True),
        (KERNEL, "ptx::mbarrier_wait(ptx::shared_address(&control.query_full[buffer.stage]), "
         "buffer.phase);", "", True),
        (PRODUCER, "ptx::cp_async_wait<kDepth>();", "ptx::cp_async_wait<kDepth + 1>();", True),
        (PRODUCER, "ahead_owner_ == unit.owner && ", "", True),
        (WORK, "unit.kv_begin + kMqaUnit, unit.kv_end", "unit.kv_begin + 128, unit.kv_end", False),
        (SCHEDULE, "part * total / parts - begin", "part * total / parts - begin + 1", True),
    ]),
)  # fmt: skip
def test_faults_are_found(
    emulator: Emulator, header: str, statement: str, other: str, paged: bool
) -> None:
    emulator.substitute(header, statement, other)
    assert find_fault(emulator, 8, 4, paged, cases=120)
