"""What the optional arguments of mixtures of experts do; see test_argument_coverage.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.testing.tensors import clone_arguments
from tests.trace.calls import Operation

OP_TYPES = ("moe", "moe_routing", "mono_moe", "moe_adapters")


def _results(operation: Operation, arguments: dict[str, Any]) -> list[torch.Tensor]:
    mine = clone_arguments(arguments)
    returned = operation.api(**mine)
    if returned is None:
        return [mine["topk_values"], mine["topk_indices"]]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.float(), b.float()) for a, b in zip(first, second, strict=True))


def _is_refused(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """What the template does not list is refused, by name."""
    assert name in operation.template.options
    with pytest.raises((TypeError, ValueError), match=name):
        operation.api(**{**arguments, name: "another"})


def _is_a_hint(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    assert name in operation.template.hints
    usual = _results(operation, arguments)
    for value in (True, False):
        assert _same(usual, _results(operation, {**arguments, name: value}))
    with pytest.raises(TypeError, match=name):
        operation.api(**{**arguments, name: "yes"})


def _changes(value: Any) -> Callable[..., None]:
    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        usual = _results(operation, arguments)
        assert not _same(usual, _results(operation, {**arguments, name: value}))

    return case


def _changes_nothing(value: Any) -> Callable[..., None]:
    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        usual = _results(operation, arguments)
        assert _same(usual, _results(operation, {**arguments, name: value}))

    return case


def _is_a_factor(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """The factor of all weights; a table's routing takes it for the shared expert alone."""
    counts = name in operation.template.inputs
    (_changes if counts else _changes_nothing)(5.0)(operation, name, arguments)
    with pytest.raises(TypeError, match=name):
        operation.api(**{**arguments, name: "5"})


def _adds(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Zeros are what None means; other numbers count."""
    if name in operation.template.options:
        _is_refused(operation, name, arguments)
        return
    weight = arguments[name.replace("biases", "weights")]
    bias = arguments["input"].new_zeros(weight.shape[:2])  # weights may be codes
    usual = _results(operation, arguments)
    assert _same(usual, _results(operation, {**arguments, name: bias}))
    changed = _results(operation, {**arguments, name: bias + 1})
    assert not _same(usual, changed)
    on_rank = {**arguments, "tp_size": 2, "tp_rank": 1, name: bias + 1}
    assert _same(usual if name.startswith("fc2") else changed, _results(operation, on_rank))


def _is_a_constant(absent: float) -> Callable[..., None]:
    """`absent` for each expert is what None means; another number counts."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        if name in operation.template.options:
            _is_refused(operation, name, arguments)
            return
        experts = arguments["fc1_expert_weights"].shape[0]
        given = torch.full((experts,), absent, device=arguments["input"].device)
        usual = _results(operation, arguments)
        assert _same(usual, _results(operation, {**arguments, name: given}))
        assert not _same(
            usual, _results(operation, {**arguments, name: torch.full_like(given, 0.25)})
        )

    return case


def _receives(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    usual = _results(operation, arguments)[0]
    destination = torch.full_like(usual, float("nan"))
    returned = operation.api(**{**clone_arguments(arguments), name: destination})
    assert (returned[0] if isinstance(returned, list) else returned) is destination
    assert torch.equal(destination, usual)
    for wrong in (destination[:-1], destination.double()):
        with pytest.raises(ValueError, match=name):
            operation.api(**{**arguments, name: wrong})


def _is_a_choice(other: Any, matters: bool) -> Callable[..., None]:
    """`other` is taken, and counts or not; what the template does not list is refused."""

    def case(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
        usual = _results(operation, arguments)
        assert _same(usual, _results(operation, {**arguments, name: other})) != matters
        _is_refused(operation, name, arguments)

    return case


def _chooses_the_activation(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    chosen = {int(value) for value in operation.template.options[name]}
    results = [_results(operation, {**arguments, name: value}) for value in sorted(chosen)]
    assert any(not _same(results[0], other) for other in results[1:])
    _is_refused(operation, name, arguments)


def _receives_a_copy(operation: Operation, name: str, arguments: dict[str, Any]) -> None:
    """Rows of tokens get the experts; further rows stay, and nothing else changes."""
    values, indices = _results(operation, arguments)[:2]
    tokens, top_k = indices.shape
    for dtype in (torch.int16, torch.int32):
        copies = torch.full((tokens + 2, top_k), -7, dtype=dtype, device=indices.device)
        mine = {**clone_arguments(arguments), name: copies}
        assert operation.api(**mine) is None
        assert torch.equal(mine["topk_values"], values)
        assert torch.equal(mine["topk_indices"], indices)
        assert torch.equal(copies[:tokens].int(), indices) and bool((copies[tokens:] == -7).all())
    for wrong in (copies[1:-2], copies.float(), copies[:, 1:], "another"):
        with pytest.raises((TypeError, ValueError), match=name):
            operation.api(**{**arguments, name: wrong})


CASES: dict[str, Callable[..., None]] = {
    "activation_type": _chooses_the_activation,
    "backend": _is_refused,
    "clamped_relu2_limit": _is_refused,
    "cluster_rank": _is_refused,
    "cluster_size": _is_refused,
    "enable_alltoall": _is_a_hint,
    "enable_pdl": _is_a_hint,
    "ep_rank": _changes(0),
    "ep_size": _changes_nothing(4),
    "expected_m": _changes_nothing(7),
    "fc1_expert_biases": _adds,
    "fc2_expert_biases": _adds,
    "finalize": _is_refused,
    "input_sf": _is_refused,
    "interleave_up": _is_a_choice(False, matters=False),
    "launch_with_pdl": _is_a_hint,
    "min_latency_mode": _is_refused,
    "num_fused_shared_experts": _is_refused,
    "out": _receives,
    "output": _receives,
    "per_pair_input": _is_refused,
    "profile_ids": _is_refused,
    "renormalize": _is_a_choice(False, matters=True),
    "routed_scaling_factor": _is_a_factor,
    "routing_replay_out": _receives_a_copy,
    "scoring_func": _is_a_choice("sigmoid", matters=True),
    "scratchpad": _changes_nothing(None),
    "situ_beta": _is_refused,
    "situ_linear_beta": _is_refused,
    "swiglu_alpha": _is_a_constant(1.0),
    "swiglu_beta": _is_a_constant(0.0),
    "swiglu_limit": _is_a_constant(float("inf")),
    "swizzled_input_sf": _is_a_hint,
    "tp_rank": _changes_nothing(0),
    "tp_size": _changes_nothing(4),
    "tune_max_num_tokens": _changes_nothing(64),
    "use_deepseek_fp8_block_scale": _is_refused,
    "use_fused_finalize": _is_a_hint,
    "use_mxfp8_act_scaling": _is_refused,
    "use_packed_weights": _is_refused,
    "use_w4_group_scaling": _is_refused,
    "use_wfp4afp8_humming": _is_refused,
    "workspace_buffer": _changes_nothing(None),
}
