"""Joins the operations of a pipeline."""

from __future__ import annotations

from collections.abc import Callable

from .fusion_rules import FusionRule, get_default_fusion_rules
from .op import Op
from .operators import LogitsTopKOp, ProbsTopKOp
from .types import TensorType

ValidityCheck = Callable[[list[Op]], None]


class CompileError(ValueError):
    """A pipeline makes no sense as a whole."""


def _check_chain(ops: list[Op]) -> None:
    for before, after in zip(ops, ops[1:], strict=False):
        if before.OUT is not after.IN:
            raise CompileError(
                f"{type(after).__name__} takes {after.IN.value}, but {type(before).__name__} gives "
                f"{before.OUT.value}"
            )


def _check_ends_with_tokens(ops: list[Op]) -> None:
    for op in ops[:-1]:
        if op.OUT is TensorType.INDICES:
            raise CompileError(f"{type(op).__name__} draws tokens, nothing can follow it")


class Compiler:
    """Fusion rules and validity checks, and the passes that apply them."""

    def __init__(self) -> None:
        self.rules: list[FusionRule] = get_default_fusion_rules()
        self.validity_checks: list[ValidityCheck] = [_check_ends_with_tokens, _check_chain]

    def register_fusion_rule(self, rule: FusionRule) -> None:
        """Add a rule; of equal priorities the one registered last is tried first."""
        self.rules.insert(0, rule)

    def register_validity_check(self, check: Callable[[list[Op]], None]) -> None:
        """Add a check of the operations before they are joined; it raises `CompileError`."""
        self.validity_checks.append(check)

    def compile(self, ops: list[Op]) -> list[Op]:
        """The operations with neighbours joined, from the left.

        Raises
        ------
        CompileError
            If a check refuses them.
        """
        if not ops:
            raise CompileError("a pipeline needs at least one operation, got none")
        for check in self.validity_checks:
            check(ops)
        joined: list[Op] = []
        position = 0
        while position < len(ops):
            op, used = self._fuse_at(ops, position)
            joined.append(op)
            position += used
        if len(joined) < len(ops):
            return self.compile(joined)
        _check_chain(joined)
        check_joint_is_fused(joined)
        return joined

    def _fuse_at(self, ops: list[Op], position: int) -> tuple[Op, int]:
        for rule in sorted(self.rules, key=lambda rule: -rule.prio):
            matched = ops[position : position + len(rule.pattern)]
            if [type(op) for op in matched] == list(rule.pattern) and rule.guard(matched):
                return rule.build(matched), len(matched)
        return ops[position], 1


def check_joint_is_fused(ops: list[Op]) -> None:
    """An option that would be ignored is refused."""
    for op in ops:
        if not isinstance(op, (LogitsTopKOp, ProbsTopKOp)):
            continue
        if op.default_params.get("joint_topk_topp"):
            raise CompileError(
                "TopK(joint_topk_topp=True) needs TopP and Sample right behind it, on probabilities"
            )


def compile_pipeline(
    ops: list[Op],
    custom_fusion_rules: list[FusionRule] | None = None,
    custom_validity_checks: list[Callable[[list[Op]], None]] | None = None,
) -> list[Op]:
    """`Compiler.compile` with more rules and checks."""
    compiler = Compiler()
    for rule in custom_fusion_rules or []:
        compiler.register_fusion_rule(rule)
    for check in custom_validity_checks or []:
        compiler.register_validity_check(check)
    return compiler.compile(ops)
