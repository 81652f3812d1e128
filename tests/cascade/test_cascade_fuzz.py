"""Merges of attention states under random dtypes, shapes, strides, masks and empty states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import cascade
from flashinfer.jit import JitSpec
from flashinfer.jit.cascade import CascadeConfig, gen_cascade_module
from flashinfer.testing import CheckOptions, error_bound
from tests.fuzzing import (
    FLOATING,
    LAYOUTS,
    Family,
    Fault,
    Layout,
    check_fault,
    empty_in_layout,
    expanded,
    longer,
    one_row_more,
    put,
    replace,
    run_fuzz,
    strided,
    with_dtype,
)

FUNCTIONS = ("merge_state", "merge_state_in_place", "merge_states")


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    dtype: torch.dtype
    tokens: int
    states: int
    heads: int
    head_dim: int
    layouts: tuple[Layout, Layout]
    s_layout: Layout
    spread: float  # of the log-sum-exps
    empty: float  # share of states without keys
    garbage: bool  # v of those is NaN
    mask: str  # "none", "bool", "uint8" or "view", of a bool tensor
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return Case(
        function=draw(st.sampled_from(FUNCTIONS)),
        dtype=draw(st.sampled_from(FLOATING)),
        tokens=draw(st.one_of(st.sampled_from([0, 1, 2, 131]), st.integers(1, 30))),
        states=draw(st.sampled_from([0, 1, 2, 2, 3, 4, 7, 8, 9, 17])),
        heads=draw(st.sampled_from([0, 1, 2, 3, 8, 20])),
        head_dim=draw(st.sampled_from([1, 2, 7, 16, 64, 128, 128, 129, 256, 512, 1030])),
        layouts=draw(st.tuples(LAYOUTS, LAYOUTS)),
        s_layout=draw(LAYOUTS),
        spread=draw(st.sampled_from([0.0, 1.0, 20.0, 1e4])),
        empty=draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        garbage=draw(st.booleans()),
        mask=draw(st.sampled_from(["none", "bool", "uint8", "view"])),
        seed=draw(st.integers(0, 2**31)),
    )


def _state(
    case: Case, shape: tuple[int, ...], layout: Layout, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    device = generator.device
    v = empty_in_layout((*shape, case.head_dim), layout, case.dtype, device)
    s = empty_in_layout(shape, case.s_layout, torch.float32, device)
    v.copy_(torch.randn(v.shape, generator=generator, device=device))
    s.copy_(torch.randn(shape, generator=generator, device=device) * case.spread)
    without = torch.rand(shape, generator=generator, device=device) < case.empty
    s.masked_fill_(without, float("-inf"))
    if case.garbage:
        v.masked_fill_(without[..., None], float("nan"))
    return v, s


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    generator = torch.Generator(device).manual_seed(case.seed)
    if case.function == "merge_states":
        shape = (case.tokens, case.states, case.heads)
        v, s = _state(case, shape, case.layouts[0], generator)
        return {"v": v, "s": s}
    shape = (case.tokens, case.heads)
    names = {
        "merge_state": ("v_a", "s_a", "v_b", "s_b"),
        "merge_state_in_place": ("v", "s", "v_other", "s_other"),
    }[case.function]
    states = [_state(case, shape, layout, generator) for layout in case.layouts]
    arguments: dict[str, Any] = dict(zip(names, [*states[0], *states[1]], strict=True))
    if case.function == "merge_state_in_place" and case.mask != "none":
        chosen = torch.rand(case.tokens, generator=generator, device=device) < 0.5
        if case.mask == "view":
            chosen = torch.stack([~chosen, chosen, ~chosen], -1)[:, 1]
        arguments["mask"] = chosen.byte() * 3 if case.mask == "uint8" else chosen
    return arguments


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    """A result is a mean of values of magnitude 1 or so; s carries its own magnitude."""
    bound = error_bound(case.dtype, 32, magnitude=6.0)
    if case.dtype == torch.float32:
        # exp2 of a difference: its error is that of the difference, in units of the larger term.
        bound = error_bound(case.dtype, 256, magnitude=6.0 + 5 * case.spread)
    return CheckOptions(bound=bound, check_bias=False)


def _shared(first: str, second: str) -> Fault:
    def fault(arguments: dict[str, Any]) -> dict[str, Any] | None:
        if first not in arguments or second not in arguments or not arguments[first].numel():
            return None
        return {**arguments, second: arguments[first]}

    return fault


FAULTS: dict[str, Fault] = {
    "mask longer": replace("mask", longer),
    "mask floating": replace("mask", with_dtype(torch.float32)),
    "mask two-dimensional": replace("mask", lambda t: t[None]),
    "v_other is v": _shared("v", "v_other"),
    "s_other is s": _shared("s", "s_other"),
    "v_b of another dtype": replace("v_b", with_dtype(torch.float64)),
    "v_other of another dtype": replace("v_other", with_dtype(torch.float64)),
    "v integer": replace("v", with_dtype(torch.int32)),
    "v_a double": replace("v_a", with_dtype(torch.float64)),
    "v flat": replace("v", lambda t: t.flatten(-2)),
    "v_a flat": replace("v_a", lambda t: t.flatten(-2)),
}
for _name in ("v", "v_a", "v_b", "v_other"):
    FAULTS |= {
        f"{_name} strided": replace(_name, strided),
        f"{_name} without a head size": replace(_name, lambda t: t[..., :0]),
        f"{_name} missing": put(_name, None),
    }
for _name in ("s", "s_a", "s_b", "s_other"):
    FAULTS |= {
        f"{_name} of integers": replace(_name, with_dtype(torch.int32)),
        f"{_name} longer": replace(_name, longer),
        f"{_name} with one row more": replace(_name, one_row_more),
        f"{_name} with a dimension more": replace(_name, lambda t: t[..., None]),
        f"{_name} missing": put(_name, None),
    }
IN_PLACE_FAULTS: dict[str, Fault] = {
    "v expanded": replace("v", expanded),
    "s expanded": replace("s", expanded),
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    options = (Layout(), Layout()), Layout(), 1.0, 0.0, False, "bool", 3
    return build(Case(function, torch.bfloat16, 5, 3, 4, 64, *options), device)


def specs() -> list[JitSpec]:
    pairs = [(dtype, pair) for dtype in FLOATING for pair in (False, True)]
    return [gen_cascade_module(CascadeConfig(dtype, pair)) for dtype, pair in pairs]


FAMILY = Family(
    "cascade",
    cascade,
    FUNCTIONS,
    cases(),
    build,
    usual,
    FAULTS,
    function_faults={"merge_state_in_place": IN_PLACE_FAULTS},
    options=options,
    specs=specs,
)


def test_merges_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
