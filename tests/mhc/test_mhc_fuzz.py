"""Hyper-connections under random dtypes, sizes, splits and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import flashinfer
from flashinfer._common.dtypes import HALF
from flashinfer.jit import JitSpec
from flashinfer.jit.mhc import (
    MhcPostConfig,
    MhcPreConfig,
    gen_mhc_post_module,
    gen_mhc_pre_module,
)
from flashinfer.testing import CheckOptions, error_bound
from tests.fuzzing import (
    Family,
    Fault,
    check_fault,
    longer,
    one_row_more,
    put,
    replace,
    run_fuzz,
    strided,
    with_dtype,
)

POST, PRE, PRENORM = FUNCTIONS = ("mhc_post", "mhc_pre_big_fuse", "mhc_pre_big_fuse_with_prenorm")


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    dtype: torch.dtype
    leading: tuple[int, ...]
    hidden: int
    splits: int
    has_splits: bool  # whether one split has a dimension of its own
    column: bool
    block_size: int
    repeat: int
    numbers: tuple[float, float, float, float]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    small = st.sampled_from([0.0, 1e-6, 1e-2])
    return Case(
        function=draw(st.sampled_from(FUNCTIONS)),
        dtype=draw(st.sampled_from(HALF)),
        leading=draw(st.sampled_from([(0,), (1,), (5,), (200,), (2, 3), (1, 2, 2, 1, 3, 1)])),
        hidden=8 * draw(st.one_of(st.integers(1, 40), st.sampled_from([512, 896, 1000]))),
        splits=draw(st.sampled_from([1, 1, 2, 16, 33])),
        has_splits=draw(st.booleans()),
        column=draw(st.booleans()),
        block_size=draw(st.sampled_from([0, 0, 64, 96, 288, 1024])),
        repeat=draw(st.integers(1, 24)),
        numbers=(draw(small), draw(small), draw(st.sampled_from([1e-6, 1e-2])), 2.0),
        seed=draw(st.integers(0, 2**31)),
    )


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def rows(*shape: int) -> torch.Tensor:
        return (8 * uniform(*shape, case.hidden) - 4).to(case.dtype)

    residual = rows(*case.leading, 4)
    if case.function == POST:
        post = uniform(*case.leading, 4)
        return {
            "x": rows(*case.leading),
            "residual": residual,
            "post_layer_mix": post.unsqueeze(-1) if case.column else post,
            "comb_res_mix": uniform(*case.leading, 4, 4),
        }
    splits = case.splits if case.function == PRE else 1
    outer = case.leading if splits == 1 and not case.has_splits else (splits, *case.leading)
    arguments: dict[str, Any] = {
        "dot_mix": 2 * uniform(*outer, 24) - 1,
        "residual": residual,
        "mhc_scale": uniform(3),
        "mhc_base": 2 * uniform(24) - 1,
        "sinkhorn_repeat": case.repeat,
        "block_size": case.block_size,
    }
    names = ("rms_eps", "mhc_pre_eps", "mhc_sinkhorn_eps", "mhc_post_mult_value")
    arguments |= dict(zip(names, case.numbers, strict=True))
    if case.function == PRE:
        k = 4 * case.hidden
        arguments |= {"sqrsum": (uniform(*outer) + 0.5) * k, "k": k, "num_splits": splits}
    return arguments


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call."""
    numbers = (1e-6, 1e-6, 1e-6, 1.0)
    fixed = (torch.bfloat16, (4,), 64, 2, True, True, 0, 20, numbers, 0)
    return build(Case(function, *fixed), device)


def options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    return CheckOptions(bound=error_bound(case.dtype, operations=512, magnitude=24.0))


FAULTS: dict[str, Fault] = {
    "residual strided": replace("residual", strided),
    "residual longer": replace("residual", longer),
    "residual missing": put("residual", None),
}
# The reference blames the tensors that should have the dtype of the streams.
KERNEL_FAULTS: dict[str, Fault] = {
    "residual float": replace("residual", with_dtype(torch.float32)),
}
_WEIGHTS: dict[str, Fault] = {
    "dot_mix with one row more": replace("dot_mix", one_row_more),
    "dot_mix longer": replace("dot_mix", longer),
    "dot_mix double": replace("dot_mix", with_dtype(torch.float64)),
    "dot_mix strided": replace("dot_mix", strided),
    "mhc_scale longer": replace("mhc_scale", longer),
    "mhc_base missing": put("mhc_base", None),
    "rms_eps negative": put("rms_eps", -1.0),
    "mhc_sinkhorn_eps not a number": put("mhc_sinkhorn_eps", float("nan")),
    "mhc_post_mult_value text": put("mhc_post_mult_value", "1"),
    "sinkhorn_repeat zero": put("sinkhorn_repeat", 0),
    "block_size odd": put("block_size", 100),
}
FUNCTION_FAULTS: dict[str, dict[str, Fault]] = {
    POST: {
        "x longer": replace("x", longer),
        "x float": replace("x", with_dtype(torch.float32)),
        "post_layer_mix longer": replace("post_layer_mix", longer),
        "comb_res_mix strided": replace("comb_res_mix", strided),
        "comb_res_mix half": replace("comb_res_mix", with_dtype(torch.float16)),
    },
    PRE: {
        **_WEIGHTS,
        "sqrsum with one row more": replace("sqrsum", one_row_more),
        "k zero": put("k", 0),
    },
    PRENORM: _WEIGHTS,
}


def specs() -> list[JitSpec]:
    found = [gen_mhc_post_module(MhcPostConfig(dtype)) for dtype in HALF]
    for prenorm in (False, True):
        found += [gen_mhc_pre_module(MhcPreConfig(dtype, prenorm)) for dtype in HALF]
    return found


FAMILY = Family(
    "hyper-connections",
    flashinfer,
    FUNCTIONS,
    cases(),
    build,
    usual,
    FAULTS,
    function_faults=FUNCTION_FAULTS,
    kernel_faults=KERNEL_FAULTS,
    options=options,
    specs=specs,
)


def test_tokens_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused(fault, device):
    check_fault(FAMILY, fault, device)
