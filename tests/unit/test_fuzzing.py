"""The fuzzers' verdict: an operation that is wrong, or accepts what it must refuse, is caught."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import strategies as st

from flashinfer.trace import Scalar, Tensor, TraceTemplate, Var
from tests.fuzzing import (
    CPU_EXAMPLES,
    FULL_PARTS,
    Family,
    FuzzRun,
    Layout,
    Tally,
    empty_in_layout,
    expanded,
    put,
    replace,
    run_fuzz,
    sliding,
    strided,
)

FAULTS = {"input strided": replace("input", strided), "factor missing": put("factor", None)}


def _reference(input, factor):
    return input.double() * factor


TEMPLATE = TraceTemplate(
    "scale",
    {"rows": Var(), "columns": Var()},
    {"input": Tensor(["rows", "columns"], layout="rows"), "factor": Scalar()},
    {"output": Tensor(["rows", "columns"], dtype_from="input")},
    reference=_reference,
)


def _operation(body):
    body.__flashinfer_trace__ = TEMPLATE
    return body


@_operation
def right(input, factor):
    TEMPLATE.validate({"input": input, "factor": factor})
    return input * factor


@_operation
def wrong_in_one_element(input, factor):
    result = right(input, factor)
    result[-1, -1] *= 1.5
    return result


@_operation
def forgets_an_element(input, factor):
    result = torch.empty_like(input)
    result[:, :-1] = input[:, :-1] * factor
    return result


@_operation
def writes_its_input(input, factor):
    result = right(input, factor)
    input.mul_(2)
    return result


@_operation
def writes_behind_its_input(input, factor):
    result = right(input, factor)
    input.as_strided((1,), (1,), input.storage_offset() + input.numel()).fill_(0)
    return result


@_operation
def accepts_everything(input, factor):
    return input * (1 if factor is None else factor)


@_operation
def writes_before_it_refuses(input, factor):
    input.zero_()
    return right(input, factor)


@_operation
def refuses_without_a_name(input, factor):
    if factor is None or input.stride(-1) != 1:
        raise ValueError("bad call")
    return right(input, factor)


def _arguments():
    input = empty_in_layout((4, 9), Layout(offset=1), torch.float32, torch.device("cpu"))
    return {"input": input.copy_(torch.randn(4, 9)), "factor": 2.0}


def test_right_operation_passes_and_is_counted():
    tally = Tally(FAULTS)
    for fault in (None, None, *FAULTS):
        tally.judge(right, _arguments(), None, fault)
    assert tally.accepted == {"right": 2}
    assert tally.refused == dict.fromkeys(FAULTS, 1)
    assert "4 cases" in tally.report("scale", torch.device("cpu"))


def test_fault_that_does_not_apply_leaves_a_good_call():
    tally = Tally({"weight strided": replace("weight", strided)})
    tally.judge(right, _arguments(), None, "weight strided")
    assert tally.accepted.total() == 1 and not tally.refused


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (wrong_in_one_element, "differ by more"),
        (forgets_an_element, "NaN"),
        (writes_its_input, "input"),
        (writes_behind_its_input, "memory"),
    ],
)
def test_silent_mismatch_is_caught(operation, words):
    with pytest.raises(AssertionError, match=words):
        Tally(FAULTS).judge(operation, _arguments(), None, None)


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (accepts_everything, "must be refused"),
        (writes_before_it_refuses, "was written"),
        (refuses_without_a_name, "does not name"),
    ],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_refusal_is_caught(operation, words, fault):
    with pytest.raises(AssertionError, match=words):
        Tally(FAULTS).judge(operation, _arguments(), None, fault)


@pytest.mark.parametrize("layout", [Layout(), Layout(3, 5), Layout(1, 2, permuted=True)])
@pytest.mark.parametrize("shape", [(4, 8), (3, 5, 8), (0, 8), (4, 0), (7,)])
def test_layouts_hold_their_elements_apart(shape, layout):
    tensor = empty_in_layout(shape, layout, torch.float16, torch.device("cpu"))
    assert tensor.shape == shape and tensor.storage_offset() == layout.offset
    values = torch.arange(tensor.numel(), dtype=torch.float16).view(shape)
    assert torch.equal(tensor.copy_(values), values)


def test_faulty_tensors_are_faulty():
    tensor = torch.zeros(4, 6)
    assert strided(tensor).stride(-1) == 2 and strided(tensor).shape == tensor.shape
    assert expanded(tensor).stride(0) == 0 and sliding(tensor).stride(0) == 1
    assert strided(tensor[:, :1]) is None and expanded(tensor[:1]) is None


def test_parts_draw_cases_of_their_own():
    def drawn_by(part):
        numbers = []

        def build(case, device):
            numbers.append(case)
            return _arguments()

        family = Family(
            "scale", sys.modules[__name__], ("right",), st.integers(0, 2**40), build, None, FAULTS
        )
        run_fuzz(family, FuzzRun(torch.device("cpu"), True, part, lambda line: None))
        return numbers

    first, second = drawn_by(0), drawn_by(1)
    assert drawn_by(0) == first, "a part draws the same cases in every run"
    assert len(set(first) & set(second)) < len(first) // 2
    wanted = 30 * CPU_EXAMPLES
    assert wanted // FULL_PARTS <= len(first) < wanted // 2
