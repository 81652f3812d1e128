"""What the optional arguments of sampling and top-k do; see test_argument_coverage.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.testing.tensors import clone_arguments
from tests.trace.calls import Operation

Case = Callable[[Operation, str, dict[str, Any]], None]


def _results(operation: Operation, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    returned = operation.api(**clone_arguments(arguments))
    return returned if isinstance(returned, tuple) else (returned,)


def _equal(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _rows(arguments: dict[str, Any]) -> torch.Tensor:
    return next(iter(arguments.values()))


def replaced_by(make: Callable[[torch.Tensor], Any]) -> Case:
    """What `make` gives of the first argument changes the result."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        changed = {**arguments, name: make(_rows(arguments))}
        assert not _equal(_results(operation, arguments), _results(operation, changed))

    return case


def has_no_effect(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = _results(operation, arguments)
    for value in (True, False):
        assert _equal(usual, _results(operation, {**arguments, name: value}))
    for value in ("yes", 1, 0.0):
        with pytest.raises(TypeError, match=name):
            operation.api(**{**arguments, name: value})


def refuses_what_is_not_listed(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    for value in operation.template.options[name]:
        _results(operation, {**arguments, name: value})
    with pytest.raises((TypeError, ValueError), match=name):
        operation.api(**{**arguments, name: "another"})


def finds_nan(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = _results(operation, arguments)
    assert _equal(usual, _results(operation, {**arguments, name: True}))
    _rows(arguments)[1, 2] = torch.nan
    assert _results(operation, arguments)[0][1] == 0
    with pytest.raises(ValueError, match="NaN"):
        operation.api(**{**arguments, name: True})


def adds_the_flag(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    _rows(arguments)[1] = 0
    tokens, valid = _results(operation, {**arguments, name: True})
    assert torch.equal(tokens, _results(operation, {**arguments, name: False})[0])
    assert valid.tolist() == [row != 1 for row in range(len(valid))]


def chooses_rows(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    rows = _rows(arguments)
    for dtype in (torch.int32, torch.int64):
        chosen = torch.arange(len(rows), device=rows.device).flip(0).to(dtype)
        moved = {
            key: value.flip(0)
            if isinstance(value, torch.Tensor) and key not in ("seed", "offset")
            else value
            for key, value in arguments.items()
        }
        tokens = _results(operation, {**arguments, name: chosen})[0]
        assert tokens.dtype == dtype
        assert tokens.tolist() == _results(operation, moved)[0].tolist()
    beyond = torch.full((2,), len(rows), device=rows.device)
    arguments |= {key: arguments[key][:2] for key in ("seed", "offset")}
    assert _results(operation, {**arguments, name: beyond})[0].tolist() == [0, 0]


def is_added_to(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = _results(operation, arguments)
    before = torch.arange(len(_rows(arguments)), dtype=torch.int32, device=usual[0].device)
    counts = before.clone()
    result = operation.api(**clone_arguments(arguments), **{name: counts})
    which = 1 if "accepted" in name else 2
    assert result[which] is counts and torch.equal(counts, usual[which] + before)


def receives_indices(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    slots = _results(operation, arguments)[0]
    raw = torch.full_like(slots, -7)
    operation.api(**clone_arguments(arguments), **{name: raw})
    assert torch.equal(raw < 0, slots < 0) and int(raw.max()) < _rows(arguments).shape[1]
    with pytest.raises(ValueError, match=name):
        operation.api(**arguments, **{name: raw[:-1]})


def is_a_page_size(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = _results(operation, arguments)
    assert not _equal(usual, _results(operation, {**arguments, name: 4}))


def draws_the_key(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Equal generators give equal tokens and move on; beside a seed, a generator stays."""
    device = _rows(arguments).device
    first, second = (torch.Generator(device).manual_seed(5) for _ in range(2))
    before = first.get_state()
    assert _equal(_results(operation, arguments), _results(operation, {**arguments, name: first}))
    assert torch.equal(first.get_state(), before)
    unseeded = {k: v for k, v in arguments.items() if k not in ("seed", "offset")}
    drawn = [_results(operation, {**unseeded, name: g}) for g in (first, second)]
    assert _equal(*drawn) and not torch.equal(first.get_state(), before)
    with pytest.raises(TypeError, match="`generator` must be a torch.Generator or None"):
        operation.api(**{**arguments, name: 3})


def _number(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(rows), dtype=torch.int32, device=rows.device)


CASES: dict[str, Case] = {
    "check_nan": finds_nan,
    "deterministic": has_no_effect,
    "dsa_graph_safe": has_no_effect,
    "filter_apply_order": refuses_what_is_not_listed,
    "generator": draws_the_key,
    "indices": chooses_rows,
    "is_deterministic": has_no_effect,
    "maybe_output_accepted_token_num": is_added_to,
    "maybe_output_emitted_draft_token_num": is_added_to,
    "offset": replaced_by(lambda rows: _number(rows).long() + 99),
    "out_raw_indices": receives_indices,
    "page_size": is_a_page_size,
    "page_table_row_starts": replaced_by(lambda rows: _number(rows) + 1),
    "return_valid": adds_the_flag,
    "row_starts": replaced_by(lambda rows: _number(rows) + 1),
    "row_to_batch": replaced_by(lambda rows: _number(rows).flip(0)),
    "seed": replaced_by(lambda rows: _number(rows).long() + 99),
    "sorted": refuses_what_is_not_listed,
    "temperature": replaced_by(lambda rows: 2.0),
    "tie_break": refuses_what_is_not_listed,
}
