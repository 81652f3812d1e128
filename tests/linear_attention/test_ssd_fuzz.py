"""Mamba-2 over whole sequences under random lengths, heads, strides, dtypes and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import mamba
from flashinfer.jit import JitSpec
from flashinfer.jit.mamba import SsdConfig, gen_ssd_module
from flashinfer.testing import CheckOptions, ErrorBound, unit_roundoff
from tests.fuzzing import (
    Family,
    Fault,
    check_fault,
    longer,
    put,
    replace,
    run_fuzz,
    strided,
    with_dtype,
)
from tests.linear_attention.drawing import FULL_EXAMPLES, Source

FUNCTIONS = ("ssd_combined_fwd",)
# Types of tensors, states and dt, and the size of a channel's state.
MODULES = (
    (torch.bfloat16, torch.float32, torch.bfloat16, 128),
    (torch.bfloat16, torch.bfloat16, torch.float32, 64),
    (torch.float16, torch.float16, torch.float32, 128),
)


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    module: tuple[torch.dtype, torch.dtype, torch.dtype, int]
    batch: int
    length: int
    groups: int
    heads_per_group: int
    dim: int
    skip: bool
    gated: bool
    biased: bool
    softplus: bool
    initial: bool
    final: bool
    with_output: bool
    gap: int  # heads between the tokens' rows that belong to no tensor
    seed: int


CASES = st.builds(
    Case,
    module=st.sampled_from(MODULES),
    batch=st.integers(0, 3),
    length=st.sampled_from([0, 1, 2, 7, 40, 63, 64, 65, 130]),
    groups=st.integers(1, 2),
    heads_per_group=st.integers(1, 3),
    dim=st.sampled_from([64, 64, 128]),
    skip=st.booleans(),
    gated=st.booleans(),
    biased=st.booleans(),
    softplus=st.booleans(),
    initial=st.booleans(),
    final=st.booleans(),
    with_output=st.booleans(),
    gap=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    source = Source(case.seed, device)
    dtype, state_dtype, dt_dtype, dstate = case.module
    # The reference walks tokens: two chunks of them are for kernels.
    length = case.length if device.type == "cuda" else min(case.length, 9)
    heads, shape = case.groups * case.heads_per_group, (case.batch, length)

    def rows(heads: int, width: int) -> torch.Tensor:
        return source.heads(*shape, heads, width, gap=case.gap, dtype=dtype)

    step = source.normal(*shape, heads)
    state = source.pool(case.batch, heads, case.dim, dstate, gap=case.gap, dtype=state_dtype)
    arguments: dict[str, Any] = {
        "x": rows(heads, case.dim),
        "dt": (step if case.softplus else step.sigmoid()).to(dt_dtype),
        "A": -source.uniform(0.02, 1.0, heads),
        "B": rows(case.groups, dstate),
        "C": rows(case.groups, dstate),
        "D": source.normal(heads) if case.skip else None,
        "z": rows(heads, case.dim) if case.gated else None,
        "dt_bias": source.uniform(0.0, 1.0, heads) if case.biased else None,
        "dt_softplus": case.softplus,
        "initial_states": state if case.initial else None,
        "return_final_states": case.final,
    }
    if case.with_output:
        arguments["out"] = torch.empty_like(arguments["x"].contiguous())
    return arguments


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    """Products have operands of the tensors' type: a few units of what a row is made of."""
    dtype, state_dtype, *_ = case.module
    coarse = max(dtype, state_dtype, key=lambda kind: torch.finfo(kind).eps)
    unit = unit_roundoff(coarse)
    return CheckOptions(
        bound=ErrorBound(2 * unit, 8 * unit, float(torch.finfo(coarse).tiny), None),
        check_bias=False,
    )


FAULTS: dict[str, Fault] = {
    "x of another dtype": replace("x", with_dtype(torch.float64)),
    "x three-dimensional": replace("x", lambda t: t[0] if len(t) else None),
    "x missing": put("x", None),
    "dt longer": replace("dt", longer),
    "dt of integers": replace("dt", with_dtype(torch.int32)),
    "A longer": replace("A", longer),
    "A of another dtype": replace("A", with_dtype(torch.float64)),
    "B longer": replace("B", longer),
    "B strided": replace("B", strided),
    "C longer": replace("C", longer),
    "C of another dtype": replace("C", with_dtype(torch.float64)),
    "D longer": replace("D", longer),
    "z longer": replace("z", longer),
    "z of another dtype": replace("z", with_dtype(torch.float64)),
    "dt_bias longer": replace("dt_bias", longer),
    "initial_states longer": replace("initial_states", longer),
    "initial_states of integers": replace("initial_states", with_dtype(torch.int32)),
    "out longer": replace("out", longer),
    "out of another dtype": replace("out", with_dtype(torch.float64)),
    "dt_limit descending": lambda arguments: {**arguments, "dt_limit": (2.0, 1.0)},
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    return build(
        Case(MODULES[0], 2, 3, 1, 2, 64, True, True, True, True, True, True, True, 1, 0), device
    )


def specs() -> list[JitSpec]:
    """Calls without initial states have float32 ones."""
    configs = {
        SsdConfig(dtype, state, dt, dstate)
        for dtype, kind, dt, dstate in MODULES
        for state in (kind, torch.float32)
    }
    return [gen_ssd_module(config) for config in configs]


FAMILY = Family(
    "Mamba-2 in chunks", mamba, FUNCTIONS, CASES, build, usual, FAULTS,
    options=options, specs=specs, full_examples=FULL_EXAMPLES,
)  # fmt: skip


def test_prefill_is_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
