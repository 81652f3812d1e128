"""Every optional argument of every operation changes a result, receives it, or is refused.

The arguments are read off the signatures: an operation with a new optional argument fails here
until `CASES` says what the argument does, and the case shows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.testing.tensors import clone_arguments
from tests.trace.calls import Operation, operations, parameters_of

OPTIONAL = [
    (operation, name)
    for operation in operations()
    for name, parameter in parameters_of(operation.function).items()
    if parameter.default is not inspect.Parameter.empty
]


def _call(operation: Operation, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Everything that one call returns or writes."""
    mine = clone_arguments(arguments)
    returned = operation.api(**mine)
    tensors = {name: value for name, value in mine.items() if isinstance(value, torch.Tensor)}
    return tensors if returned is None else {**tensors, "returned": returned}


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name].float(), second[name].float()) for name in first)


def changes_the_result(value: Any) -> Callable[..., None]:
    """Another value than the default gives another result, and the default is the default."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        default = parameters_of(operation.function)[name].default
        usual = _call(operation, arguments)
        assert _same(usual, _call(operation, {**arguments, name: default}))
        assert not _same(usual, _call(operation, {**arguments, name: value}))

    return case


def receives_the_result(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """The tensor given is what is returned, and holds the result."""
    usual = _call(operation, arguments)["returned"]
    destination = torch.full_like(usual, float("nan"))
    returned = operation.api(**clone_arguments(arguments), **{name: destination})
    assert returned is destination
    assert torch.equal(destination, usual)
    with pytest.raises(ValueError, match=name):
        operation.api(**arguments, **{name: destination[:-1]})
    with pytest.raises(ValueError, match=name):
        operation.api(**arguments, **{name: destination.double()})


def is_a_hint(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Changes how the kernel is launched, no bit of a result; what is no bool is refused."""
    assert name in operation.template.hints
    usual = _call(operation, arguments)
    for value in (True, False):
        assert _same(usual, _call(operation, {**arguments, name: value}))
    for value in ("yes", 1, 0.0):
        with pytest.raises(TypeError, match=name):
            operation.api(**{**arguments, name: value})


CASES: dict[str, Callable[..., None]] = {
    "eps": changes_the_result(0.5),
    "out": receives_the_result,
    "enable_pdl": is_a_hint,
}


@pytest.mark.parametrize(
    ("operation", "name"), OPTIONAL, ids=[f"{o.function.__name__}-{n}" for o, n in OPTIONAL]
)
def test_optional_argument(operation: Operation, name: str, device: torch.device):
    assert name in CASES, f"say in CASES what {name} of {operation.label} does"
    CASES[name](operation, name, operation.arguments(device=device))


def test_optional_arguments_are_found():
    """Eleven operations: eight with eps, five with out (layernorm allocates), nine with a hint."""
    counts = {name: sum(n == name for _, n in OPTIONAL) for _, name in OPTIONAL}
    assert counts["eps"] >= 8 and counts["out"] >= 5 and counts["enable_pdl"] >= 9
    assert set(CASES) <= set(counts), "no case without an argument"
