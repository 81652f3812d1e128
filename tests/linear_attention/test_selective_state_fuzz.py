"""Mamba's selective state update under random shapes, strides, dtypes, slots and options."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import mamba
from flashinfer.jit import JitSpec
from flashinfer.jit.mamba import SelectiveStateConfig, gen_selective_state_update_module
from flashinfer.testing import CheckOptions, error_bound
from tests.fuzzing import (
    Family,
    Fault,
    check_fault,
    expanded,
    longer,
    put,
    replace,
    run_fuzz,
    strided,
    with_dtype,
)
from tests.linear_attention.drawing import FULL_EXAMPLES, Source, bounds_of

FUNCTIONS = ("selective_state_update",)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Types of x, states, dt, A and of the weights, and the size of a channel's state.
MODULES = (
    (BF16, BF16, BF16, FP32, BF16, 128),
    (BF16, FP32, FP32, FP32, FP32, 64),
    (FP16, FP16, FP16, FP32, FP32, 16),
    (FP32, FP32, FP32, FP32, FP32, 256),
)
FORMS = ("one head", "one token", "tokens", "packed")
SLOTS = ("rows", "slots", "slots of tokens")


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    module: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype, torch.dtype, int]
    form: str  # which dimensions x has
    lengths: tuple[int, ...]  # of packed sequences; in other forms there are as many sequences
    tokens: int
    groups: int
    heads_per_group: int
    dim: int
    tied: bool  # A, dt and dt_bias are one number per head
    skip: bool
    gated: bool
    biased: bool
    softplus: bool
    frozen: bool
    slots: str
    moved: bool  # other slots are written than are read
    accepted: bool  # slots of tokens: how many tokens of the last call count
    pad_slot: int
    padding: bool
    with_output: bool
    index: torch.dtype
    gap: int  # heads between tokens' rows and between states that belong to no tensor
    seed: int

    @property
    def heads(self) -> int:
        return 1 if self.form == "one head" else self.groups * self.heads_per_group

    @property
    def by_token(self) -> bool:
        return self.slots == "slots of tokens" and self.form in ("tokens", "packed")


CASES = st.builds(
    Case,
    module=st.sampled_from(MODULES),
    form=st.sampled_from(FORMS),
    lengths=st.lists(st.integers(0, 6), max_size=5).map(tuple),
    tokens=st.integers(0, 6),
    groups=st.integers(1, 2),
    heads_per_group=st.integers(1, 3),
    dim=st.sampled_from([1, 4, 40, 64, 100, 128]),
    tied=st.booleans(),
    skip=st.booleans(),
    gated=st.booleans(),
    biased=st.booleans(),
    softplus=st.booleans(),
    frozen=st.booleans(),
    slots=st.sampled_from(SLOTS),
    moved=st.booleans(),
    accepted=st.booleans(),
    pad_slot=st.sampled_from([-1, -1, 0, 1000]),
    padding=st.booleans(),
    with_output=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
    gap=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)


def _for_reference(case: Case) -> Case:
    """A similar call that the reference backend takes: heads, D, a slot a sequence, no packing."""
    return replace_fields(
        case,
        form=case.form if case.form == "tokens" else "one token",
        slots="rows" if case.slots == "rows" else "slots",
        dim=min(case.dim, 40),
        moved=False,
        pad_slot=-1,
        skip=True,
    )


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    if device.type != "cuda":
        case = _for_reference(case)
    source, batch = Source(case.seed, device), len(case.lengths)
    dtype, state_dtype, dt_dtype, a_dtype, weight_dtype, dstate = case.module
    leading = {"tokens": (batch, case.tokens), "packed": (sum(case.lengths),)}
    tokens = leading.get(case.form, (batch,))
    alone = case.form == "one head"
    groups = 1 if alone else case.groups

    def rows(heads: int, width: int) -> torch.Tensor:
        found = source.heads(*tokens, heads, width, gap=case.gap, dtype=dtype)
        return found[:, 0] if alone else found

    def weights(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        """One number per channel or, tied, per head; `shape` ends with the dimensions of both."""
        if case.tied:
            found = source.normal(*shape[:-1], 1, dtype=dtype).expand(*shape)
        else:
            found = source.normal(*shape, dtype=dtype)
        return found.squeeze(-2) if alone else found

    decay = -source.uniform(0.1, 1.0, case.heads, *((1, 1) if case.tied else (case.dim, dstate)))
    decay = decay.to(a_dtype).expand(case.heads, case.dim, dstate)
    step = weights(*tokens, case.heads, case.dim, dtype=dt_dtype)
    slots = batch if case.slots == "rows" else 2 * batch * _columns(case) + 3
    pool = source.pool(slots, case.heads, case.dim, dstate, gap=case.gap, dtype=state_dtype)
    arguments: dict[str, Any] = {
        "state": pool[:, 0] if alone else pool,
        "x": rows(case.heads, case.dim),
        "dt": step if case.softplus else step.sigmoid(),
        "A": decay[0] if alone else decay,
        "B": rows(groups, dstate),
        "C": rows(groups, dstate),
        "D": weights(case.heads, case.dim, dtype=weight_dtype) if case.skip else None,
        "z": rows(case.heads, case.dim) if case.gated else None,
        "dt_bias": weights(case.heads, case.dim, dtype=weight_dtype).abs() if case.biased else None,
        "dt_softplus": case.softplus,
        "disable_state_update": case.frozen,
        "pad_slot_id": case.pad_slot,
        "algorithm": "auto",
        "backend": "auto",
    }
    if case.with_output:
        arguments["out"] = rows(case.heads, case.dim)
    if case.form == "packed":
        arguments["cu_seqlens"] = bounds_of(case.lengths, case.index, device)
    _add_slots(arguments, case, source, slots)
    return arguments


def _columns(case: Case) -> int:
    """Slots of a sequence: one, or with one per token at least two, which make them a table."""
    if not case.by_token:
        return 1
    longest = max(case.lengths, default=0) if case.form == "packed" else case.tokens
    return max(longest, 2)


def _add_slots(arguments: dict[str, Any], case: Case, source: Source, size: int) -> None:
    """Slots that are read and those that are written, all distinct; some are padding."""
    if case.slots == "rows":
        return
    batch, columns = len(case.lengths), _columns(case)
    count = batch * columns
    order = source.slots(size, size, torch.int64, False)
    order = order[order != case.pad_slot]

    def some(first: int) -> torch.Tensor:
        found = order[first : first + count]
        if case.padding:
            found = torch.where(source.uniform(0, 1, count) < 0.3, case.pad_slot, found)
        found = found.to(case.index)
        return found.view(batch, columns) if columns > 1 else found

    arguments["state_batch_indices"] = some(0)
    if case.moved:
        arguments["dst_state_batch_indices"] = some(count)
    if columns > 1 and case.accepted:
        steps = source.uniform(1, columns + 1, batch).clamp(max=columns)
        arguments["num_accepted_tokens"] = steps.int()


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    """Everything is float32 until results are rounded; sums are over a channel's state."""
    dtype, state_dtype, *_, dstate = case.module
    coarse = max(dtype, state_dtype, key=lambda kind: torch.finfo(kind).eps)
    return CheckOptions(bound=error_bound(coarse, dstate, magnitude=8.0 * dstate**0.5))


FAULTS: dict[str, Fault] = {
    "state of integers": replace("state", with_dtype(torch.int32)),
    "state longer": replace("state", longer),
    "state expanded": replace("state", expanded),
    "x of another dtype": replace("x", with_dtype(torch.float64)),
    "x strided": replace("x", strided),
    "x missing": put("x", None),
    "dt longer": replace("dt", longer),
    "dt of integers": replace("dt", with_dtype(torch.int32)),
    "A longer": replace("A", longer),
    "A of another dtype": replace("A", with_dtype(torch.float64)),
    "B longer": replace("B", longer),
    "B of another dtype": replace("B", with_dtype(torch.float64)),
    "C longer": replace("C", longer),
    "C strided": replace("C", strided),
    "D longer": replace("D", longer),
    "z longer": replace("z", longer),
    "z of another dtype": replace("z", with_dtype(torch.float64)),
    "dt_bias longer": replace("dt_bias", longer),
    "state_batch_indices of floats": replace("state_batch_indices", with_dtype(torch.float32)),
    "out longer": replace("out", longer),
    "out of another dtype": replace("out", with_dtype(torch.float64)),
    "algorithm unknown": put("algorithm", "another"),
    "backend unknown": put("backend", "another"),
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    case = Case(
        MODULES[0], "tokens", (1, 1, 1), 2, 1, 2, 64, True, True, True, True, True, False, "slots",
        False, False, -1, False, True, torch.int32, 1, 0,
    )  # fmt: skip
    return build(case, device)


def specs() -> list[JitSpec]:
    """A call without D and dt_bias has weights of float32."""
    configs = {
        SelectiveStateConfig(*kinds, weight, dstate, tied)
        for *kinds, own, dstate in MODULES
        for weight in (own, torch.float32)
        for tied in (True, False)
    }
    return [gen_selective_state_update_module(config) for config in configs]


FAMILY = Family(
    "selective state update", mamba, FUNCTIONS, CASES, build, usual, FAULTS,
    options=options, specs=specs, full_examples=FULL_EXAMPLES,
)  # fmt: skip


def test_update_is_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
