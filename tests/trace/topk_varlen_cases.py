"""Cases for the optional arguments of `top_k_varlen`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.trace.calls import Operation

OP_TYPES = ("topk_varlen",)


def _guess(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual, _ = operation.api(**arguments)
    guess = torch.zeros_like(usual)
    assert torch.equal(operation.api(**arguments, pre_idx=guess)[0], usual)
    for wrong in (guess[:, 1:].contiguous(), guess.long()):
        with pytest.raises(ValueError, match=name):
            operation.api(**arguments, pre_idx=wrong)


def _divides(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual, _ = operation.api(**arguments)
    assert not torch.equal(operation.api(**{**arguments, name: 2})[0], usual)
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: 0})


def _rows_of_a_request(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    logits, lengths = arguments["logits"], arguments["seq_lens"]
    twice = {**arguments, "logits": logits.repeat_interleave(2, 0)}
    found, _ = operation.api(**{**twice, name: 2})
    assert torch.equal(found[1::2], operation.api(**arguments)[0])
    shorter = {**arguments, "seq_lens": lengths - 1}
    assert torch.equal(found[::2], operation.api(**shorter)[0])
    with pytest.raises(ValueError, match="seq_lens"):
        operation.api(**{**arguments, name: 2})


def _values(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    indices, nothing = operation.api(**arguments)
    assert nothing is None
    out = torch.empty(indices.shape, dtype=arguments["logits"].dtype, device=indices.device)
    again, values = operation.api(**arguments, return_values=True, out_values=out)
    assert values is out and torch.equal(again, indices)
    expected = arguments["logits"].gather(1, indices.clamp(min=0).long())
    assert torch.equal(values, expected.masked_fill(indices < 0, -torch.inf))
    for options in ({}, {"return_values": False}):
        with pytest.raises((TypeError, ValueError), match="out_values"):
            operation.api(**arguments, **options, out_values=out)


def _receives(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual, _ = operation.api(**arguments)
    out = torch.full_like(usual, -7)
    assert operation.api(**arguments, out_indices=out)[0] is out and torch.equal(out, usual)
    for wrong in (out[:-1], out.long()):
        with pytest.raises(ValueError, match=name):
            operation.api(**arguments, out_indices=wrong)


def _is_refused(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        operation.api(**arguments, **{name: "gvr"})


CASES: dict[str, Callable[..., None]] = {
    "pre_idx": _guess,
    "compress_ratio": _divides,
    "next_n": _rows_of_a_request,
    **dict.fromkeys(("return_values", "out_values"), _values),
    "out_indices": _receives,
    **dict.fromkeys(("backend", "load_balance", "workspace"), _is_refused),
}
