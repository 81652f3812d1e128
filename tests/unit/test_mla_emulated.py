"""The portable MLA kernel on the CPU, with planner and merge: tests/emulation says how."""

from __future__ import annotations

import pytest

from tests.unit.test_attention_emulated import Emulator, emulator, one_by_default

__all__ = ["emulator"]  # a fixture

KERNEL = "flashinfer/mla/portable/mla.cuh"


def find_fault(
    emulator: Emulator, arch: int, dtype: str, dims: tuple[int, int], cases: int = 3
) -> str:
    """What the emulation says; empty if all is right."""
    shared = "extern __shared__ __align__(128) char shared[];"
    emulator.substitute(KERNEL, shared, "char* const shared = dynamic_shared;")
    flags = {"DTYPE_Q": dtype, "DTYPE_O": dtype, "HEAD_DIM_CKV": dims[0], "HEAD_DIM_KPE": dims[1]}
    options = [f"-DFLASHINFER_CFG_{name}={value}" for name, value in flags.items()]
    program = emulator.build("mla_emulation.cc", [f"-DEMULATION_ARCH={arch}", *options])
    done = emulator.call([program, str(cases * emulator.rounds)])
    return f"exit status {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""


@pytest.mark.parametrize(
    ("arch", "dtype", "dims"),
    [
        (900, "bfloat16", (512, 64)),
        pytest.param(800, "float16", (512, 64), marks=pytest.mark.full),
        pytest.param(860, "bfloat16", (512, 64), marks=pytest.mark.full),
        pytest.param(900, "float16", (256, 0), marks=pytest.mark.full),
        (800, "bfloat16", (512, 0)),
        (860, "float16", (256, 64)),
    ],
)
def test_random_problems(emulator: Emulator, arch: int, dtype: str, dims: tuple[int, int]) -> None:
    assert not find_fault(emulator, arch, dtype, dims)


@pytest.mark.parametrize(
    ("statement", "other"),
    one_by_default(
        [
            ("__syncthreads();  // the weights are there", ""),
            ("__syncthreads();  // the tile and the weights have been read", ""),
            ("told(1 - half_, row_ + 8 * h)), largest_[h]", "largest[h]), largest_[h]"),
            ("sum[h] = told(0, row_ + 8 * h) + told(1, row_ + 8 * h)", "sum[h] = sum_[h]"),
            ("ptx::cp_async_wait<kAhead>();", "ptx::cp_async_wait<kAhead + 1>();"),
        ]
    ),
)
def test_faults_are_found(emulator: Emulator, statement: str, other: str) -> None:
    emulator.substitute(KERNEL, statement, other)
    assert find_fault(emulator, 900, "bfloat16", (256, 64))
