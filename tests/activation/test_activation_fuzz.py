"""Gated activations under random dtypes, shapes, strides, alignments and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import flashinfer
from flashinfer.jit import JitSpec
from flashinfer.jit.activation import gen_act_and_mul_module
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
    sliding,
    strided,
    with_dtype,
)

FUNCTIONS = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")


@dataclass(frozen=True)
class Case:
    """One call that the documentation allows."""

    function: str
    dtype: torch.dtype
    leading: tuple[int, ...]
    width: int
    input_layout: Layout
    out_layout: Layout
    out: str  # "none", "new" or "columns" of the matrix that holds the input
    enable_pdl: bool | None
    spread: float
    special: str
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    width = draw(WIDTHS)
    leading = [draw(ROWS)] + [draw(st.integers(1, 5)) for _ in range(draw(st.integers(0, 2)))]
    leading = leading[draw(st.integers(0, 1)) :] if len(leading) == 1 else leading
    while leading and 2 * width * torch.Size(leading).numel() > MAX_ELEMENTS:
        leading[0] //= 2
    return Case(
        function=draw(st.sampled_from(FUNCTIONS)),
        dtype=draw(st.sampled_from(FLOATING)),
        leading=tuple(leading),
        width=width,
        input_layout=draw(LAYOUTS),
        out_layout=draw(LAYOUTS),
        out=draw(st.sampled_from(["none", "new", "columns"])),
        enable_pdl=draw(st.sampled_from([None, True, False])),
        spread=draw(st.sampled_from([1e-3, 1.0, 1.0, 30.0])),
        special=draw(st.sampled_from(["", "", "0", "nan", "inf"])),
        seed=draw(st.integers(0, 2**31)),
    )


def _rows(case: Case, width: int, layout: Layout, device: torch.device) -> torch.Tensor:
    """[..., width]: the leading dimensions fold, rows may have gaps between them."""
    count = torch.Size(case.leading).numel()
    matrix = empty_in_layout((count, width), Layout(layout.offset, layout.gap), case.dtype, device)
    return matrix.unflatten(0, case.leading) if case.leading else matrix[0]


def build(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of `case`."""
    generator = torch.Generator(device).manual_seed(case.seed)
    all_columns = _rows(case, 3 * case.width, case.input_layout, device)
    input = all_columns[..., : 2 * case.width]
    if case.out != "columns":
        input = _rows(case, 2 * case.width, case.input_layout, device)
    # An infinity times an activation that float32 flushes to zero is NaN, but not in float64.
    spread = 1.0 if case.special == "inf" else case.spread
    values = torch.randn(input.shape, generator=generator, device=device) * spread
    if case.special and values.numel():
        values.view(-1)[:: case.width + 1] = float(case.special)
    arguments: dict[str, Any] = {"input": input.copy_(values), "enable_pdl": case.enable_pdl}
    if case.out == "columns":
        arguments["out"] = all_columns[..., 2 * case.width :]
    elif case.out == "new":
        arguments["out"] = _rows(case, case.width, case.out_layout, device)
    return arguments


def _unfoldable(tensor: torch.Tensor) -> torch.Tensor | None:
    """Two leading dimensions in the other order: they do not fold into one."""
    if tensor.ndim == 0 or tensor.shape[-1] == 0:
        return None
    return tensor.new_zeros((2, 3, tensor.shape[-1])).transpose(0, 1)


def _out_over_input(arguments: dict[str, Any]) -> dict[str, Any] | None:
    input = arguments["input"]
    out = input[..., : input.shape[-1] // 2]
    return {**arguments, "out": out} if out.numel() else None


FAULTS: dict[str, Fault] = {
    "input odd": replace("input", longer),
    "input strided": replace("input", strided),
    "input integer": replace("input", with_dtype(torch.int32)),
    "input double": replace("input", with_dtype(torch.float64)),
    "input scalar": replace("input", lambda t: t.new_zeros(())),
    "input with leading dimensions that do not fold": replace("input", _unfoldable),
    "input missing": put("input", None),
    "out longer": replace("out", longer),
    "out with one row more": replace("out", one_row_more),
    "out of another dtype": replace("out", with_dtype(torch.float64)),
    "out strided": replace("out", strided),
    "out expanded": replace("out", expanded),
    "out sliding": replace("out", sliding),
    "out over input": _out_over_input,
    "out a list": put("out", [1.0]),
    "enable_pdl text": put("enable_pdl", "yes"),
    "enable_pdl number": put("enable_pdl", 1),
}


def _options(case: Case, arguments: dict[str, Any]) -> CheckOptions:
    """GELU of a negative number is a small difference of terms as large as the number."""
    terms = arguments["input"].double().abs()
    finite = terms[terms.isfinite()]
    largest = finite.max().item() if finite.numel() else 0.0
    return CheckOptions(bound=error_bound(case.dtype, magnitude=largest * max(largest, 1.0)))


def usual(function: str, device: torch.device) -> dict[str, Any]:
    """An ordinary call of `function`."""
    options = Layout(), Layout(), "new", None, 1.0, "", 0
    return build(Case(function, torch.bfloat16, (4,), 64, *options), device)


def specs() -> list[JitSpec]:
    names = [function.removesuffix("_and_mul") for function in FUNCTIONS]
    return [gen_act_and_mul_module(name, dtype) for name in names for dtype in FLOATING]


FAMILY = Family(
    "activation",
    flashinfer,
    FUNCTIONS,
    cases(),
    build,
    usual,
    FAULTS,
    options=_options,
    specs=specs,
)


def test_activations_are_right_or_refused(fuzz_run):
    run_fuzz(FAMILY, fuzz_run)


@pytest.mark.parametrize("fault", FAMILY.all_faults())
def test_fault_is_refused_by_every_function_that_it_concerns(fault, device):
    check_fault(FAMILY, fault, device)
