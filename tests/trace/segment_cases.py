"""Calls of `SegmentGEMMWrapper.run`, and what its optional arguments do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import flashinfer
from tests.trace.attention_wrapper_cases import Case, _equal, _is_refused, _results

if TYPE_CHECKING:
    from tests.trace.calls import Operation


def _run(values: Any) -> dict[str, Any]:
    wrapper = flashinfer.gemm.SegmentGEMMWrapper(values.workspace())
    bounds = torch.tensor([0, 5, 5, 50], dtype=torch.int32, device=values.device)
    tensors = {"x": values(50, 64), "weights": values(3, 40, 64), "seg_indptr": bounds}
    return {"self": wrapper, **tensors, "batch_size": 3, "weight_column_major": True}


CALLS: dict[str, Callable[[Any], dict[str, Any]]] = {"segment_gemm": _run}
"""By the name of the template: arguments of `run`, its object among them."""


def _receives(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    (expected,) = _results(operation, arguments)
    destination = torch.full_like(expected, float("nan"))
    assert operation.api(**{**arguments, name: destination}) is destination
    assert torch.equal(destination, expected)
    _is_refused(destination[:-1], destination.double())(operation, name, arguments)


def _lengths(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Lengths say what bounds say; both or none are refused."""
    bounds = arguments["seg_indptr"]
    others = {key: value for key, value in arguments.items() if key != "seg_indptr"}
    lengths = {**others, "seg_lens": bounds.diff()}
    assert _equal(_results(operation, arguments), _results(operation, lengths))
    for wrong in (others, {**lengths, "seg_indptr": bounds}):
        with pytest.raises(ValueError, match=name):
            operation.api(**wrong)
    given = lengths if name == "seg_lens" else arguments
    _is_refused(given[name][1:], given[name].float(), [0, 5])(operation, name, given)


def _indices(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    numbers = torch.tensor([0, 1, 2], dtype=torch.int32, device=arguments["x"].device)
    usual = _results(operation, arguments)
    assert _equal(usual, _results(operation, {**arguments, name: numbers}))
    assert not _equal(usual, _results(operation, {**arguments, name: numbers.flip(0)}))
    _is_refused(numbers.float())(operation, name, arguments)


CASES: dict[str, dict[str, Case]] = {
    "SegmentGEMMWrapper.run": {
        "out": _receives,
        "seg_lens": _lengths,
        "seg_indptr": _lengths,
        "weight_indices": _indices,
    }
}
"""By method and argument."""
