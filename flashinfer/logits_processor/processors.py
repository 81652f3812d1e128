"""The processors that a pipeline is made of."""

from __future__ import annotations

from typing import Any

from . import operators as ops
from .op import Op
from .types import TensorType


class LogitsProcessor:
    """Base of the processors. A subclass defines `legalize`.

    Parameters
    ----------
    **params
        Default parameters of its operations; a call of the pipeline may override them.
    """

    def __init__(self, **params: Any) -> None:
        self.params = params

    def legalize(self, input_type: TensorType) -> list[Op]:
        """Operations that do this to a tensor of `input_type`.

        Raises
        ------
        ValueError
            If there are none.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define legalize")

    def _choose(self, input_type: TensorType, **choices: type[ops.ParameterizedOp]) -> list[Op]:
        """The choice for `input_type`, with this processor's parameters."""
        op = choices.get(input_type.value)
        if op is None:
            hint = "; put Softmax before it" if input_type is TensorType.LOGITS else ""
            raise ValueError(
                f"{type(self).__name__} takes {' or '.join(choices)}, got {input_type.value}{hint}"
            )
        return [op(**self.params)]


class Temperature(LogitsProcessor):
    """Logits divided by `temperature` (a number, or one per row)."""

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._choose(input_type, logits=ops.TemperatureOp)


class Softmax(LogitsProcessor):
    """Logits to probabilities.

    Parameters
    ----------
    enable_pdl : bool, optional
        As for `flashinfer.sampling.softmax`.
    """

    def __init__(self, enable_pdl: bool | None = None, **params: Any) -> None:
        super().__init__(enable_pdl=enable_pdl, **params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._choose(input_type, logits=ops.SoftmaxOp)


class TopK(LogitsProcessor):
    """Keeps the `top_k` largest elements: logits are masked, probabilities renormalised.

    Parameters
    ----------
    joint_topk_topp : bool
        A `TopP` that follows looks at the whole row, not at what `TopK` has left. Only where the
        two are drawn from in one operation.
    """

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        super().__init__(joint_topk_topp=joint_topk_topp, **params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._choose(input_type, logits=ops.LogitsTopKOp, probs=ops.ProbsTopKOp)


class TopP(LogitsProcessor):
    """Keeps the nucleus of `top_p`, renormalised."""

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._choose(input_type, probs=ops.TopPOp)


class MinP(LogitsProcessor):
    """Keeps what is at least `min_p` times the largest, renormalised."""

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._choose(input_type, probs=ops.MinPOp)


class Sample(LogitsProcessor):
    """Draws one token per row; takes `indices`, `generator`, `check_nan`, `seed` and `offset`.

    Parameters
    ----------
    deterministic : bool
        Accepted for compatibility: results are always deterministic.
    """

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(deterministic=deterministic, **params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._choose(input_type, logits=ops.LogitsSampleOp, probs=ops.ProbsSampleOp)
