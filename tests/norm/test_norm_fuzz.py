"""Norms under random dtypes, shapes, strides, alignments, aliasing and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import flashinfer
from flashinfer.jit import JitSpec
from flashinfer.jit.norm import NormConfig, gen_norm_module
from flashinfer.testing import CheckOptions, error_bound
from tests.fuzzing import (
    FLOATING,
    LAYOUTS,
    MAX_ELEMENTS,
    ROWS,
    WIDTHS,
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
    shifted,
    sliding,
    strided,
    with_dtype,
)

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WITH_OUT = ("rmsnorm", "gemma_rmsnorm")
IN_PLACE = ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm")
QUANTIZED = ("rmsnorm_quant", "fused_add_rmsnorm_quant", "layernorm_quant")
FUNCTIONS = (*WITH_OUT, *IN_PLACE, *QUANTIZED, "layernorm")


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    shape: tuple[int, ...]
    input_layout: Layout
    other_layout: Layout
    out: str  # "none", "new", "input" or "columns" of the matrix that holds the input
    eps: float
    enable_pdl: bool | None
    scale_is_tensor: bool
    spread: float
    special: str
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    width = draw(WIDTHS)
    leading = [draw(ROWS)] + [draw(st.integers(1, 9))] * draw(st.integers(0, 1))
    while width * leading[0] * leading[-1] > MAX_ELEMENTS:
        leading[0] //= 2
    return Case(
        function=draw(st.sampled_from(FUNCTIONS)),
        dtype=draw(st.sampled_from(FLOATING)),
        out_dtype=draw(st.sampled_from(FLOAT8)),
        shape=(*leading, width),
        input_layout=draw(LAYOUTS),
        other_layout=draw(LAYOUTS),
        out=draw(st.sampled_from(["none", "new", "input", "columns"])),
        eps=draw(st.sampled_from([1e-6, 1e-5, 0.1, 3])),
        enable_pdl=draw(st.sampled_from([None, True, False])),
        scale_is_tensor=draw(st.booleans()),
        spread=draw(st.sampled_from([1e-3, 1.0, 1.0, 100.0])),
        special=draw(st.sampled_from(["", "", "zero row", "nan", "inf"])),
        seed=draw(st.integers(0, 2**31)),
    )


def _fill(tensor: torch.Tensor, case: Case, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(tensor.shape, generator=generator, device=tensor.device) * case.spread
    if case.special and tensor.numel():
        values.view(-1, tensor.shape[-1])[0, -1] = float(case.special.replace("zero row", "0"))
        if case.special == "zero row":
            values.view(-1, tensor.shape[-1])[0] = 0
    return tensor.copy_(values)


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    generator = torch.Generator(device).manual_seed(case.seed)
    is_layernorm = case.function.startswith("layernorm")
    wide = (*case.shape[:-1], 2 * case.shape[-1])
    both = empty_in_layout(wide, case.input_layout, case.dtype, device)
    input = _fill(both[..., : case.shape[-1]], case, generator)
    if case.out != "columns":
        input = empty_in_layout(case.shape, case.input_layout, case.dtype, device).copy_(input)

    arguments: dict[str, Any] = {"input": input, "eps": case.eps}
    width = (case.shape[-1],)
    aligned = Layout(case.other_layout.offset)
    for name in ("gemma", "beta") if is_layernorm else ("weight",):
        dtype = torch.float32 if is_layernorm else case.dtype
        weight = empty_in_layout(width, aligned, dtype, device)
        arguments[name] = weight.copy_(torch.randn(width, generator=generator, device=device))
    if "fused_add" in case.function:
        residual = empty_in_layout(case.shape, case.other_layout, case.dtype, device)
        arguments["residual"] = _fill(residual, case, generator)
    if not is_layernorm:
        arguments["enable_pdl"] = case.enable_pdl
    if case.function in QUANTIZED:
        arguments["out"] = empty_in_layout(case.shape, case.other_layout, case.out_dtype, device)
        # Small scales saturate, large ones underflow.
        scale = 10.0 ** (case.seed % 7 - 4)
        arguments["scale"] = torch.full((1,), scale, device=device)
        if not case.scale_is_tensor:
            arguments["scale"] = scale
    elif case.function in WITH_OUT and case.out != "none":
        arguments["out"] = {
            "input": input,
            "columns": both[..., case.shape[-1] :],
            "new": empty_in_layout(case.shape, case.other_layout, case.dtype, device),
        }[case.out]
    return arguments


FAULTS: dict[str, Fault] = {
    "input strided": replace("input", strided),
    "input integer": replace("input", with_dtype(torch.int32)),
    "input double": replace("input", with_dtype(torch.float64)),
    "input one-dimensional": replace("input", lambda t: t.reshape(-1)),
    "input four-dimensional": replace("input", lambda t: t[(None,) * (4 - t.ndim)]),
    "input missing": put("input", None),
    "weight longer": replace("weight", longer),
    "weight two-dimensional": replace("weight", lambda t: t[None]),
    "weight strided": replace("weight", strided),
    "weight of another dtype": replace("weight", with_dtype(torch.float64)),
    "weight missing": put("weight", None),
    "gemma of another dtype": replace("gemma", with_dtype(torch.bfloat16)),
    "gemma longer": replace("gemma", longer),
    "beta of another dtype": replace("beta", with_dtype(torch.float16)),
    "beta strided": replace("beta", strided),
    "beta missing": put("beta", None),
    "residual longer": replace("residual", longer),
    "residual with one row more": replace("residual", one_row_more),
    "residual of another dtype": replace("residual", with_dtype(torch.float64)),
    "residual strided": replace("residual", strided),
    "residual expanded": replace("residual", expanded),
    "residual sliding": replace("residual", sliding),
    "residual is input": replace("residual", lambda t: t if t.numel() else None, "input"),
    "residual shifted from input": replace("residual", shifted, "input"),
    "residual is a list": put("residual", [1.0]),
    "out longer": replace("out", longer),
    "out with one row more": replace("out", one_row_more),
    "out of another dtype": replace("out", with_dtype(torch.float64)),
    "out strided": replace("out", strided),
    "out expanded": replace("out", expanded),
    "out sliding": replace("out", sliding),
    "eps negative": put("eps", -1e-6),
    "eps not a number": put("eps", float("nan")),
    "eps infinite": put("eps", float("inf")),
    "eps beyond float32": put("eps", 1e39),
    "eps text": put("eps", "1e-6"),
    "eps missing": put("eps", None),
    "enable_pdl text": put("enable_pdl", "yes"),
    "enable_pdl number": put("enable_pdl", 1),
    "scale zero": put("scale", 0.0),
    "scale negative": put("scale", -1.0),
    "scale not a number": put("scale", float("nan")),
    "scale below float32": put("scale", 1e-39),
    "scale missing": put("scale", None),
}


def _out_over_input(arguments: dict[str, Any]) -> dict[str, Any] | None:
    if "out" not in arguments or arguments["out"].dtype != arguments["input"].dtype:
        return None
    out = shifted(arguments["input"])
    return None if out is None else {**arguments, "out": out}


def _scale_with_two_elements(arguments: dict[str, Any]) -> dict[str, Any] | None:
    scale = torch.ones(2, device=arguments["input"].device)
    return {**arguments, "scale": scale} if "scale" in arguments else None


def _scale_of_integers(arguments: dict[str, Any]) -> dict[str, Any] | None:
    scale = torch.ones(1, dtype=torch.int32, device=arguments["input"].device)
    return {**arguments, "scale": scale} if "scale" in arguments else None


FAULTS |= {
    "out shifted from input": _out_over_input,
    "scale with two elements": _scale_with_two_elements,
    "scale of integers": _scale_of_integers,
}


def _options(case: Case, arguments: dict[str, Any]) -> CheckOptions | None:
    """A layer norm subtracts the mean: its error grows with the mean over the deviation."""
    if not case.function.startswith("layernorm") or not arguments["input"].numel():
        return None
    x = arguments["input"].double()
    condition = x.abs().amax(-1) / (x.var(-1, correction=0) + case.eps).sqrt()
    condition = condition[condition.isfinite()].max().item() if condition.isfinite().any() else 1.0
    top = arguments["gemma"].abs().max().item() * max(condition, 1.0)
    magnitude = top + arguments["beta"].abs().max().item()
    dtype = case.dtype
    if case.function in QUANTIZED:
        dtype, scale = case.out_dtype, float(arguments["scale"])
        magnitude /= scale
    bound = error_bound(dtype, case.shape[-1], magnitude=magnitude)
    return CheckOptions(bound=bound)


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    options = Layout(), Layout(), "new", 1e-6, None, False, 1.0, "", 0
    return build(Case(function, torch.bfloat16, FLOAT8[0], (4, 64), *options), device)


def specs() -> list[JitSpec]:
    kinds = [{}, {"add_residual": True}, {"subtract_mean": True}]
    return [
        gen_norm_module(NormConfig(dtype, out, **kind))
        for dtype in FLOATING
        for out in (dtype, *FLOAT8)
        for kind in kinds
    ]


FAMILY = Family(
    "norm", flashinfer, FUNCTIONS, cases(), build, usual, FAULTS, options=_options, specs=specs
)


def test_norms_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
