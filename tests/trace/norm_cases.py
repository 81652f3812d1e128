"""Cases for the optional arguments of norms with gates and of modulated norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.trace.calls import Operation, results_of

OP_TYPES = ("gated_residual_rmsnorm", "modulated_layernorm")


def _results(operation: Operation, arguments: dict[str, Any]) -> list[torch.Tensor]:
    returned = operation.api(**arguments)
    return [x.float() for x in results_of(operation.template, {}, returned)]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def _counts(value: Any) -> Callable[..., None]:
    """Another number, or columns of it, gives another result."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        if name == "gain_center":
            arguments = {**arguments, "weight": torch.ones_like(arguments["beta"]).bfloat16()}
        if name == "post_gain_center":
            arguments = {**arguments, "post_weight": arguments["next_weight"]}
        usual = _results(operation, arguments)
        assert not _same(usual, _results(operation, {**arguments, name: value}))

    return case


def _columns(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Columns of halves count; those that are too few are refused."""
    rows = arguments["branch"] if "branch" in arguments else arguments["input"]
    dtype = rows.dtype if name == "post_weight" else torch.float32
    columns = torch.arange(rows.shape[-1], device=rows.device).remainder(5).to(dtype)
    without = {**arguments, name: None}
    usual = _results(operation, without)
    assert not _same(usual, _results(operation, {**without, name: columns}))
    if name.endswith("_bias"):
        assert _same(
            _results(operation, {**without, name: columns}),
            _results(operation, {**without, name: columns[None]}),
        )
    with pytest.raises(ValueError, match=name):
        operation.api(**{**without, name: columns[:-1].contiguous()})


def _factor(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    without = {**arguments, name: None}
    one = torch.ones(1, device=arguments["input"].device)
    assert _same(_results(operation, without), _results(operation, {**without, name: one}))
    assert not _same(_results(operation, without), _results(operation, {**without, name: one * 2}))


def _residual(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    without = {**arguments, name: None}
    zeros = torch.zeros_like(arguments["input"])
    assert _same(_results(operation, without), _results(operation, {**without, name: zeros}))
    assert not _same(
        _results(operation, without), _results(operation, {**without, name: zeros + 1})
    )


def _receives(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = _results(operation, arguments)
    place = 1 if name in ("ffn_input", "norm_out") else 0
    dtype = torch.float32 if "branch" in arguments and place == 0 else torch.bfloat16
    destination = usual[place].to(dtype).fill_(-7)
    returned = operation.api(**{**arguments, name: destination})
    found = returned[place] if isinstance(returned, tuple) else returned
    assert found is destination and torch.equal(destination.float(), usual[place])
    for wrong in (destination[:-1], destination.double()):
        with pytest.raises(ValueError, match=name):
            operation.api(**{**arguments, name: wrong})


def _is_a_hint(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    assert name in operation.template.hints
    assert _same(_results(operation, arguments), _results(operation, {**arguments, name: False}))
    for value in ("yes", 1, 0.0):
        with pytest.raises(TypeError, match=name):
            operation.api(**{**arguments, name: value})


def _is_refused(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    value = True if name.startswith("use_") else torch.ones(1)
    with pytest.raises((TypeError, ValueError), match=name):
        operation.api(**{**arguments, name: value})


CASES: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("eps", "epsilon", "post_eps", "next_eps"), _counts(5.0)),
    **dict.fromkeys(("gain_center", "post_gain_center", "next_gain_center"), _counts(1.0)),
    **dict.fromkeys(("gate_bias", "scale_bias", "shift_bias", "post_weight"), _columns),
    **dict.fromkeys(("out", "residual_out", "ffn_input", "norm_out"), _receives),
    **dict.fromkeys(("use_nvfp4", "use_mxfp8", "global_scaling_factor", "sf_out"), _is_refused),
    "input_global_scaling_factor": _factor,
    "residual": _residual,
    "enable_pdl": _is_a_hint,
}
