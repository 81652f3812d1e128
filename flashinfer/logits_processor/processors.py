"""The processors that a pipeline is made of."""

from __future__ import annotations

from typing import Any, ClassVar

from .._common.checks import flag as check_flag
from . import operators as ops
from .op import Op
from .types import TensorType


class LogitsProcessor:
    """Base of the processors. A subclass defines `legalize`.

    Parameters
    ----------
    **params
        Default parameters of its operations; a call of the pipeline may override them.

    Attributes
    ----------
    PARAMETERS : tuple of str, optional
        The names that `params` may have; None: all.
    """

    PARAMETERS: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, **params: Any) -> None:
        for name in params:
            if self.PARAMETERS is not None and name not in self.PARAMETERS:
                raise TypeError(
                    f"`{name}` is no parameter of {type(self).__name__}, which takes "
                    f"{' and '.join(map(repr, self.PARAMETERS))}"
                )
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

    PARAMETERS = ops.TemperatureOp.PARAMETERS

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._choose(input_type, logits=ops.TemperatureOp)


class Softmax(LogitsProcessor):
    """Logits to probabilities.

    Parameters
    ----------
    enable_pdl : bool, optional
        As for `flashinfer.sampling.softmax`.
    """

    PARAMETERS = ("enable_pdl",)

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

    PARAMETERS = ("joint_topk_topp", *ops.ProbsTopKOp.PARAMETERS)

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        joint = check_flag("joint_topk_topp", joint_topk_topp)
        super().__init__(joint_topk_topp=joint, **params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._choose(input_type, logits=ops.LogitsTopKOp, probs=ops.ProbsTopKOp)


class TopP(LogitsProcessor):
    """Keeps the nucleus of `top_p`, renormalised."""

    PARAMETERS = ops.TopPOp.PARAMETERS

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._choose(input_type, probs=ops.TopPOp)


class MinP(LogitsProcessor):
    """Keeps what is at least `min_p` times the largest, renormalised."""

    PARAMETERS = ops.MinPOp.PARAMETERS

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._choose(input_type, probs=ops.MinPOp)


class Sample(LogitsProcessor):
    """Draws one token per row; takes `indices`, `generator`, `check_nan`, `seed` and `offset`.

    Parameters
    ----------
    deterministic : bool
        Accepted for compatibility: results are always deterministic.
    """

    PARAMETERS = ("deterministic", *ops.ProbsSampleOp.PARAMETERS)

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(deterministic=deterministic, **params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._choose(input_type, logits=ops.LogitsSampleOp, probs=ops.ProbsSampleOp)
