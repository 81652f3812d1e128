"""Operations of a pipeline: from one kind of tensor to one kind of tensor."""

from __future__ import annotations

from typing import Any, ClassVar

from .types import TaggedTensor, TensorType


class Op:
    """Base of the operations. A subclass sets `IN` and `OUT` and defines `__call__`.

    Attributes
    ----------
    IN, OUT : TensorType
        What it takes and gives.
    PARAMETERS : tuple of str
        Names that a call may pass to it.
    """

    IN: ClassVar[TensorType]
    OUT: ClassVar[TensorType]
    PARAMETERS: ClassVar[tuple[str, ...]] = ()

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        """Apply to `tensor`; `kwargs` are the parameters of the pipeline's call."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")

    def _validate_input_type(self, tensor: TaggedTensor) -> None:
        """Refuse a tensor of another meaning than `IN`; operations of users call it."""
        self._checked(tensor)

    def _checked(self, tensor: TaggedTensor) -> TaggedTensor:
        if tensor.type is not self.IN:
            raise ValueError(
                f"{type(self).__name__} takes {self.IN.value}, got {tensor.type.value}"
            )
        return tensor


class ParameterizedOp(Op):
    """An operation with parameters: defaults from its creation, overridden by those of a call.

    Parameters
    ----------
    **default_params
        Values by name; None counts as not given.
    """

    def __init__(self, **default_params: Any) -> None:
        self.default_params = default_params

    def _get_param(
        self, name: str, runtime_kwargs: dict[str, Any], required: bool = True, default: Any = None
    ) -> Any:
        """The call's value of `name`, else the default one.

        Raises
        ------
        ValueError
            If there is none and it is `required`.
        """
        for values in (runtime_kwargs, self.default_params):
            if values.get(name) is not None:
                return values[name]
        if required:
            raise ValueError(
                f"`{name}` is needed by {type(self).__name__}: pass it to the call of the pipeline "
                "or to the processor"
            )
        return default
