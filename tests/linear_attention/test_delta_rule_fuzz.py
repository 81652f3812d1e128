"""Decode of the gated delta rule under random shapes, strides, dtypes and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flashinfer import gdn_decode
from flashinfer.jit import JitSpec
from flashinfer.jit.delta_rule import DeltaRuleConfig, gen_delta_rule_module
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

FUNCTIONS = ("gated_delta_rule_decode_pretranspose",)
# Types of tensors and states, and the head size of keys: one module each.
MODULES = (
    (torch.bfloat16, torch.float32, 128),
    (torch.bfloat16, torch.bfloat16, 64),
    (torch.float16, torch.float16, 32),
)


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    module: tuple[torch.dtype, torch.dtype, int]
    batch: int
    tokens: int
    heads: int
    group: int
    head_dim_v: int
    normalize: bool
    scale: float | None
    gap: int  # heads between the tokens' rows that belong to no tensor
    with_output: bool
    seed: int


CASES = st.builds(
    Case,
    module=st.sampled_from(MODULES),
    batch=st.integers(0, 5),
    tokens=st.integers(0, 6),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim_v=st.sampled_from([8, 16, 40, 64, 128, 136]),
    normalize=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.1]),
    gap=st.integers(0, 2),
    with_output=st.booleans(),
    seed=st.integers(0, 2**31),
)


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    generator = torch.Generator(device).manual_seed(case.seed)
    dtype, state_dtype, dim = case.module
    v_heads = case.heads * case.group

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def rows(heads: int, width: int) -> torch.Tensor:
        padded = new(case.batch, case.tokens, heads + case.gap, width, dtype=dtype)
        return padded[:, :, :heads]

    width = 1.0 if case.normalize else dim**-0.5
    arguments = {
        "q": rows(case.heads, dim),
        "k": rows(case.heads, dim) * width,
        "v": rows(v_heads, case.head_dim_v),
        "state": new(case.batch, v_heads, case.head_dim_v, dim).to(state_dtype),
        "A_log": new(v_heads),
        "a": new(case.batch, case.tokens, v_heads, dtype=dtype),
        "dt_bias": new(v_heads),
        "b": new(case.batch, case.tokens, v_heads, dtype=dtype),
        "scale": case.scale,
        "use_qk_l2norm": case.normalize,
        "backend": "auto",
    }
    if case.with_output:
        arguments["output"] = torch.empty_like(arguments["v"].contiguous())
    return arguments


def _options(case: Case, arguments: dict[str, Any]) -> CheckOptions | None:
    """Everything is float32 until results are rounded; a state has a few units, an output sums."""
    dtype, state_dtype, dim = case.module
    coarse = max(dtype, state_dtype, key=lambda kind: torch.finfo(kind).eps)
    factor = dim**-0.5 if case.scale is None else case.scale
    magnitude = 8.0 * max(1.0, factor * (1.0 if case.normalize else dim**0.5))
    return CheckOptions(bound=error_bound(coarse, dim, magnitude=magnitude))


FAULTS: dict[str, Fault] = {
    "q of another dtype": replace("q", with_dtype(torch.float64)),
    "q three-dimensional": replace("q", lambda t: t[0] if len(t) else None),
    "k longer": replace("k", longer),
    "k strided": replace("k", lambda t: strided(t) if t.numel() else None),
    "v of another dtype": replace("v", with_dtype(torch.float64)),
    "v missing": put("v", None),
    "state of integers": replace("state", with_dtype(torch.int32)),
    "state longer": replace("state", longer),
    "state expanded": replace("state", lambda t: expanded(t) if t.numel() else None),
    "A_log of another dtype": replace("A_log", with_dtype(torch.float64)),
    "A_log longer": replace("A_log", longer),
    "a longer": replace("a", longer),
    "dt_bias longer": replace("dt_bias", longer),
    "b longer": replace("b", longer),
    "scale not a number": put("scale", float("nan")),
    "scale text": put("scale", "1"),
    "output longer": replace("output", longer),
    "output of another dtype": replace("output", with_dtype(torch.float64)),
    "backend unknown": put("backend", "another"),
}


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    return build(Case(MODULES[0], 2, 3, 2, 2, 16, True, None, 1, True, 0), device)


def specs() -> list[JitSpec]:
    return [
        gen_delta_rule_module(DeltaRuleConfig(dtype, state, dtype, dtype, torch.float32, dim))
        for dtype, state, dim in MODULES
    ]


FAMILY = Family(
    "gated delta rule", gdn_decode, FUNCTIONS, CASES, build, usual, FAULTS,
    options=_options, specs=specs,
)  # fmt: skip


def test_decode_is_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
