"""Neighbouring operations that one kernel can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import operators as ops
from .op import Op, ParameterizedOp


class FusionRule(NamedTuple):
    """Replaces a run of operations by one.

    Attributes
    ----------
    pattern : tuple of type
        Types of the operations, in order.
    guard : callable
        Whether the matching operations may be replaced.
    build : callable
        The operation in their place.
    prio : int
        Rules of higher priority are tried first.
    """

    pattern: tuple[type[Op], ...]
    guard: Callable[[list[Op]], bool]
    build: Callable[[list[Op]], Op]
    prio: int = 0


def _parameters(matched: list[Op]) -> dict[str, Any]:
    """Default parameters of all of them; the last one wins, as it would be applied last."""
    merged: dict[str, Any] = {}
    for op in matched:
        if isinstance(op, ParameterizedOp):
            merged |= {n: v for n, v in op.default_params.items() if v is not None}
    return merged


def _is_joint(matched: list[Op]) -> bool:
    return bool(_parameters(matched).get("joint_topk_topp", False))


def _always(matched: list[Op]) -> bool:
    return True


def _not_joint(matched: list[Op]) -> bool:
    return not _is_joint(matched)


def _rule(
    result: type[ParameterizedOp],
    *pattern: type[Op],
    guard: Callable[[list[Op]], bool] = _always,
) -> FusionRule:
    def build(matched: list[Op]) -> Op:
        return result(**_parameters(matched))

    return FusionRule(pattern, guard, build, prio=10 * len(pattern))


def get_default_fusion_rules() -> list[FusionRule]:
    """The rules of every compiler; longer patterns first."""
    both = (ops.ProbsTopKOp, ops.TopPOp, ops.ProbsSampleOp)
    return [
        _rule(ops.LogitsTopKTopPSampleOp, ops.SoftmaxOp, *both, guard=_not_joint),
        _rule(ops.LogitsJointTopKTopPSampleOp, ops.SoftmaxOp, *both, guard=_is_joint),
        _rule(ops.TopKTopPSampleOp, *both, guard=_not_joint),
        _rule(ops.JointTopKTopPSampleOp, *both, guard=_is_joint),
        _rule(ops.TemperatureSoftmaxOp, ops.TemperatureOp, ops.SoftmaxOp),
        _rule(ops.TopKSampleOp, ops.ProbsTopKOp, ops.ProbsSampleOp),
        _rule(ops.TopPSampleOp, ops.TopPOp, ops.ProbsSampleOp),
        _rule(ops.MinPSampleOp, ops.MinPOp, ops.ProbsSampleOp),
        _rule(ops.LogitsSampleOp, ops.SoftmaxOp, ops.ProbsSampleOp),
    ]
