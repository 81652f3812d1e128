"""What the optional arguments of recurrent layers do; see test_argument_coverage.py.

Arguments that only the kernels take (slots per token, packed tokens, scaled states) are shown in
tests/linear_attention; here their defaults are what leaving them out is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.testing.tensors import clone_arguments
from tests.trace.calls import Operation, parameters_of

OP_TYPES = ("checkpointing_ssu", "gdn", "gdn2", "kda", "selective_state_update", "ssd")


def _results(operation: Operation, arguments: dict[str, Any]) -> list[torch.Tensor]:
    mine = clone_arguments(arguments)
    returned = operation.api(**mine)
    if returned is None:
        return [mine[spec.param or key] for key, spec in operation.template.outputs.items()]
    results = returned if isinstance(returned, tuple) else (returned,)
    return [result for result in results if result is not None]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.float(), b.float()) for a, b in zip(first, second, strict=True))


def _default_is_absence(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    default = parameters_of(operation.function)[name].default
    assert default is not inspect.Parameter.empty
    without = {key: value for key, value in arguments.items() if key != name}
    same = _same(_results(operation, without), _results(operation, {**without, name: default}))
    assert same


def _receives(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = _results(operation, arguments)[0]
    destination = torch.full_like(usual, float("nan"))
    assert operation.api(**{**clone_arguments(arguments), name: destination}) is not None
    assert torch.equal(destination, usual)
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: destination.double()})


def _changes(value: Any) -> Callable[..., None]:
    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        usual = _results(operation, arguments)
        assert not _same(usual, _results(operation, {**arguments, name: value}))

    return case


def _is_a_flag(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    default = parameters_of(operation.function)[name].default
    _changes(not default)(operation, name, arguments)


def _backend(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=name):
        operation.api(**{**arguments, name: "another"})


def _is_required(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        operation.api(**{**arguments, name: None})


def _cu_seqlens(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    prefill = operation.template.op_type in ("gdn", "gdn2")
    (_is_required if prefill else _default_is_absence)(operation, name, arguments)


def _required_by_its_template(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    spec = operation.template.inputs.get(name)
    required = spec is not None and not spec.optional
    (_is_required if required else _default_is_absence)(operation, name, arguments)


def _returns_states(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Whether the second result is there."""
    for wanted in (False, True):
        returned = operation.api(**{**clone_arguments(arguments), name: wanted})
        assert (returned[1] is not None) == wanted


def _is_told_by_the_gate(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """A gate's inputs and the flag belong together."""
    with pytest.raises((TypeError, ValueError), match="A_log"):
        operation.api(**{**arguments, name: "A_log" not in operation.template.inputs})


def _belongs_to_checkpoints(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """The three are given together, or none."""
    if name not in operation.template.inputs:
        return _default_is_absence(operation, name, arguments)
    default = parameters_of(operation.function)[name].default
    with pytest.raises((TypeError, ValueError), match="checkpoint_"):
        operation.api(**{**arguments, name: default})


def _belongs_to_windows(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """The flag and the windows are given together, or none."""
    if "replayssm_g" not in operation.template.inputs:
        return _default_is_absence(operation, name, arguments)
    default = parameters_of(operation.function)[name].default
    with pytest.raises((TypeError, ValueError), match="replayssm"):
        operation.api(**{**arguments, name: default})


def _divides_the_updates(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Keys and values have as many rows as the tokens have updates."""
    for wrong in (1, 3, 0):
        with pytest.raises(ValueError, match=name):
            operation.api(**{**arguments, name: wrong})


_KNOWN: dict[str, Callable[..., None]] = {
    "cache_replayssm": _belongs_to_windows,
    **{f"replayssm_{name}": _belongs_to_windows for name in ("rawv", "rawk", "g", "beta")},
    "num_householder": _divides_the_updates,
    "return_final_states": _returns_states,
    "backend": _backend,
    "scale": _changes(3.0),
    **dict.fromkeys(
        ("state_checkpoints", "checkpoint_cu_starts", "checkpoint_every_n_tokens"),
        _belongs_to_checkpoints,
    ),
    "cu_seqlens": _cu_seqlens,
    "output": _receives,
    "out": _receives,
    "A_log": _required_by_its_template,
    "initial_state_source": _required_by_its_template,
    "use_gate_in_kernel": _is_told_by_the_gate,
    "lower_bound": _default_is_absence,
    "use_qk_l2norm": _is_a_flag,
    "use_qk_l2norm_in_kernel": _is_a_flag,
    **dict.fromkeys(("q", "k", "v", "b"), _is_required),
}


class Cases(dict[str, Callable[..., None]]):
    """The case of an argument; its default is its absence where nothing else is said."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Callable[..., None]:
        return _default_is_absence


CASES = Cases(_KNOWN)
