"""Turns processors into operations."""

from __future__ import annotations

from .op import Op
from .processors import LogitsProcessor
from .types import TensorType


class LegalizationError(ValueError):
    """A processor cannot work on the tensor that reaches it."""


def infer_input_type(processor: LogitsProcessor) -> TensorType:
    """The input type of a pipeline that begins with `processor`.

    Raises
    ------
    LegalizationError
        If the processor takes logits as well as probabilities, or neither.
    """
    taken, refusal = [], None
    for candidate in (TensorType.LOGITS, TensorType.PROBS):
        try:
            legalize_processors([processor], candidate)
            taken.append(candidate)
        except LegalizationError as error:
            refusal = refusal or error
    if len(taken) == 1:
        return taken[0]
    if refusal is not None:
        raise refusal
    raise LegalizationError(
        f"Cannot infer what a pipeline receives that begins with {type(processor).__name__}: "
        "`input_type` must be TensorType.LOGITS or TensorType.PROBS, got None"
    )


def legalize_processors(
    processors: list[LogitsProcessor], initial_type: TensorType = TensorType.LOGITS
) -> list[Op]:
    """The operations that processors stand for, given what the first one receives.

    Raises
    ------
    LegalizationError
        If a processor has no operation for what reaches it.
    """
    ops: list[Op] = []
    current = initial_type
    for position, processor in enumerate(processors):
        if not isinstance(processor, LogitsProcessor):
            raise LegalizationError(
                f"`processors[{position}]` must be a LogitsProcessor, got {processor!r}"
            )
        try:
            chosen = processor.legalize(current)
        except ValueError as error:
            raise LegalizationError(f"`processors[{position}]`: {error}") from error
        for op in chosen:
            if op.IN is not current:
                raise LegalizationError(
                    f"`processors[{position}]`: {type(op).__name__} takes {op.IN.value}, got "
                    f"{current.value}"
                )
            current = op.OUT
        ops += chosen
    return ops
