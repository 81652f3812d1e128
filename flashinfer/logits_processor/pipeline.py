"""A pipeline that can be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .compiler import check_joint_is_fused, compile_pipeline
from .fusion_rules import FusionRule
from .legalization import infer_input_type, legalize_processors
from .op import Op
from .processors import LogitsProcessor
from .types import TaggedTensor, TensorType


class LogitsPipe:
    """Processors applied one after the other, in as few kernels as the fusion rules allow.

    Parameters
    ----------
    processors : list of LogitsProcessor
        In order; at least one.
    compile : bool
        Join operations. Without, each processor runs by itself.
    input_type : TensorType, optional
        What a call passes. None infers it from the first processor, if that takes either logits or
        probabilities and not both.
    custom_fusion_rules, custom_validity_checks : list, optional
        As for `compile_pipeline`.

    Raises
    ------
    LegalizationError, CompileError
        Both are ValueErrors: a processor does not fit what reaches it, or the pipeline makes no
        sense.

    Examples
    --------
    >>> from flashinfer.logits_processor import LogitsPipe, Sample, Softmax, Temperature, TopP
    >>> logits = torch.randn(4, 32000, device="cuda")
    >>> pipe = LogitsPipe([Temperature(), Softmax(), TopP(), Sample()])
    >>> tokens = pipe(logits, temperature=0.7, top_p=0.9, seed=1)
    """

    def __init__(
        self,
        processors: list[LogitsProcessor],
        compile: bool = True,
        input_type: TensorType | None = None,
        custom_fusion_rules: list[FusionRule] | None = None,
        custom_validity_checks: list[Callable[[list[Op]], None]] | None = None,
    ) -> None:
        if not processors:
            raise ValueError("`processors` must have at least one processor, got none")
        self.processors = list(processors)
        if input_type is None:
            input_type = infer_input_type(self.processors[0])
        self.input_type = self.initial_type = input_type
        self.ops = legalize_processors(self.processors, self.input_type)
        self.compiled_ops: list[Op] | None = None
        if compile:
            self.compile(custom_fusion_rules, custom_validity_checks)
        else:
            check_joint_is_fused(self.ops)

    def __repr__(self) -> str:
        return f"LogitsPipe({' -> '.join(type(op).__name__ for op in self._running())})"

    def compile(
        self,
        custom_fusion_rules: list[FusionRule] | None = None,
        custom_validity_checks: list[Callable[[list[Op]], None]] | None = None,
    ) -> None:
        """Join operations, once more with other rules if it was done before."""
        self.compiled_ops = compile_pipeline(self.ops, custom_fusion_rules, custom_validity_checks)

    def _running(self) -> list[Op]:
        return self.ops if self.compiled_ops is None else self.compiled_ops

    def __call__(self, x: torch.Tensor | TaggedTensor, **kwargs: Any) -> torch.Tensor:
        """Run the pipeline.

        Parameters
        ----------
        x : torch.Tensor or TaggedTensor
            ``[batch, vocab]``, of the pipeline's input type.
        **kwargs
            Parameters of the operations by name: `temperature`, `top_k`, `top_p`, `min_p`,
            `indices`, `generator`, `check_nan`, `seed`, `offset`, and those of custom operations.

        Returns
        -------
        torch.Tensor
            The result of the last operation.

        Raises
        ------
        TypeError
            If no operation takes one of `kwargs`.
        ValueError
            If an operation lacks a parameter, or `x` is of another type than the pipeline's input.
        """
        running = self._running()
        known = {name for op in running for name in op.PARAMETERS}
        if not all(op.PARAMETERS or type(op).__module__.startswith(__package__) for op in running):
            known |= set(kwargs)  # a custom operation without a list takes what it likes
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"`{name}` is no parameter of this pipeline, which takes {sorted(known)}"
                )
        tensor = x if isinstance(x, TaggedTensor) else TaggedTensor(x, self.input_type)
        if tensor.type is not self.input_type:
            raise ValueError(
                f"`x` must be {self.input_type.value} for this pipeline, got {tensor.type.value}"
            )
        for op in running:
            tensor = op(tensor, **kwargs)
        return tensor.data
