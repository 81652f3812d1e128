"""Optional arguments of hyper-connections; see test_argument_coverage.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.trace.calls import Operation

OP_TYPES = ("mhc",)


def _same(operation: Operation, first: dict[str, Any], second: dict[str, Any]) -> bool:
    results = zip(operation.api(**first), operation.api(**second), strict=True)
    return all(torch.equal(x, y) for x, y in results)


def _counts(value: Any) -> Callable[..., None]:
    """Another number gives another result; one that is out of range is refused."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        assert not _same(operation, arguments, {**arguments, name: value})
        wrong = float("nan") if isinstance(value, float) else 0
        with pytest.raises(ValueError, match=name):
            operation.api(**{**arguments, name: wrong})

    return case


def _splits(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Parts are added; their number must be that of the tensors."""
    dots, squares = arguments["dot_mix"].sum(0), arguments["sqrsum"].sum(0)
    whole = {**arguments, "dot_mix": dots, "sqrsum": squares, name: 1}
    for added, direct in zip(operation.api(**arguments), operation.api(**whole), strict=True):
        torch.testing.assert_close(added, direct, rtol=0.01, atol=1e-3)
    with pytest.raises(ValueError, match="dot_mix"):
        operation.api(**{**arguments, name: len(arguments["dot_mix"]) + 1})


def _threads(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Any number of warps gives the same result; other numbers are refused."""
    for value in (64, 1024):
        other_call = {**arguments, name: value}
        results = zip(operation.api(**arguments), operation.api(**other_call), strict=True)
        for usual, other in results:
            torch.testing.assert_close(usual, other, rtol=0.01, atol=1e-3)
    for wrong in (32, 65, 1056, -64):
        with pytest.raises(ValueError, match=name):
            operation.api(**{**arguments, name: wrong})


CASES: dict[str, Callable[..., None]] = {
    "rms_eps": _counts(5.0),
    "mhc_pre_eps": _counts(1.0),
    "mhc_sinkhorn_eps": _counts(1.0),
    "mhc_post_mult_value": _counts(2.0),
    "sinkhorn_repeat": _counts(1),
    "num_splits": _splits,
    "block_size": _threads,
}
