"""The kernels around the products of a mixture of experts, on the CPU: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

MAP, ROUTE = "flashinfer/moe/map.cuh", "flashinfer/moe/route.cuh"
COMBINE = "flashinfer/moe/combine.cuh"


def find_fault(emulator: Emulator, full: bool) -> str:
    """What the emulation says; empty if all is right."""
    shared = "extern __shared__ uint32_t moe_map_shared[];"
    portable = "auto* const moe_map_shared = reinterpret_cast<uint32_t*>(dynamic_shared);"
    emulator.substitute(MAP, shared, portable)
    program = emulator.build("moe_emulation.cc", ["-DEMULATION_ARCH=900"])
    done = emulator.call([program, "400" if full else "40"])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


def test_random_mixtures(emulator: Emulator, full: bool) -> None:
    assert not find_fault(emulator, full)


@pytest.mark.parametrize(
    ("header", "statement", "other", "message"),
    one_by_default(
        [
            (MAP, "__syncwarp();  // all lanes have read the count", "", "row of entry"),
            (MAP, "if (lane == 0) offsets[num_experts]", "if (false) offsets[num_experts]", "rows"),
            (
                COMBINE,
                "if (row_of[j] >= params.num_rows) continue;",
                "if (row_of[j] - 1 >= params.num_rows) continue;",
                "sum",
            ),
            (ROUTE, "other_index < index", "other_index > index", "equal scores"),
            (ROUTE, "size > 1 ? detail::ordered(sum) : best", "best", "choice"),
        ]
    ),
)
def test_faults_are_found(
    emulator: Emulator, header: str, statement: str, other: str, message: str
) -> None:
    emulator.substitute(header, statement, other)
    assert message in find_fault(emulator, False)
