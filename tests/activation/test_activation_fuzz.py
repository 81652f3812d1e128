"""Gated activations under random dtypes, shapes, strides, alignments and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashinfer
from flashinfer.testing import CheckOptions, error_bound
from tests.fuzzing import (
    CPU_EXAMPLES,
    FLOATING,
    GPU_EXAMPLES,
    LAYOUTS,
    MAX_ELEMENTS,
    ROWS,
    WIDTHS,
    Fault,
    Layout,
    Tally,
    empty_in_layout,
    expanded,
    faults,
    fuzz_settings,
    longer,
    one_row_more,
    put,
    replace,
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
    """Leading dimensions in the other order: they no longer fold into one."""
    if tensor.ndim < 3 or min(tensor.shape[:2]) < 2 or tensor.numel() == 0:
        return None
    swapped = (tensor.shape[1], tensor.shape[0], *tensor.shape[2:])
    return tensor.new_zeros(swapped).transpose(0, 1)


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


@pytest.fixture(scope="module")
def modules() -> None:
    """All modules of the family, built at once: the fuzzer then spends its time on calls."""
    if torch.cuda.is_available():
        from flashinfer.jit.activation import gen_act_and_mul_module
        from flashinfer.jit.core import build_jit_specs

        names = [function.removesuffix("_and_mul") for function in FUNCTIONS]
        build_jit_specs([gen_act_and_mul_module(n, dtype) for n in names for dtype in FLOATING])


def test_activations_are_right_or_refused(device, modules, full, capsys):
    examples = (GPU_EXAMPLES if device.type == "cuda" else CPU_EXAMPLES) * (5 if full else 1)
    tally = Tally(FAULTS)

    @fuzz_settings(examples)
    @given(case=cases(), fault=faults(FAULTS))
    def check(case: Case, fault: str | None) -> None:
        arguments = build(case, device)
        tally.judge(getattr(flashinfer, case.function), arguments, _options(case, arguments), fault)

    check()
    with capsys.disabled():
        print(tally.report("activation", device))
    assert set(tally.accepted) == set(FUNCTIONS)
    assert tally.accepted.total() + tally.refused.total() >= examples


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_refused_by_every_function(fault, device):
    """The fuzzer's faults one by one, so that none depends on being drawn."""
    tally = Tally(FAULTS)
    leading = (4, 3) if "fold" in fault else (4,)
    for function in FUNCTIONS:
        usual = Layout(), Layout(), "new", None, 1.0, "", 0
        arguments = build(Case(function, torch.bfloat16, leading, 64, *usual), device)
        tally.refuse(getattr(flashinfer, function), FAULTS[fault](arguments), fault)
    assert tally.refused[fault] == len(FUNCTIONS)
