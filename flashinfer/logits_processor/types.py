"""The meanings that a tensor in a pipeline can have."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class TensorType(enum.Enum):
    """Meaning of the elements of a tensor."""

    LOGITS = "logits"
    PROBS = "probs"
    INDICES = "indices"


@dataclass(frozen=True)
class TaggedTensor:
    """A tensor and what it means.

    Parameters
    ----------
    data : torch.Tensor
        ``[batch, vocab]``, or tokens ``[batch]``.
    type : TensorType
        Meaning of the elements.
    """

    data: torch.Tensor
    type: TensorType

    @staticmethod
    def logits(t: torch.Tensor) -> TaggedTensor:
        """Logits ``[batch, vocab]``."""
        return TaggedTensor(t, TensorType.LOGITS)

    @staticmethod
    def probs(t: torch.Tensor) -> TaggedTensor:
        """Probabilities ``[batch, vocab]``."""
        return TaggedTensor(t, TensorType.PROBS)

    @staticmethod
    def indices(t: torch.Tensor) -> TaggedTensor:
        """Tokens ``[batch]``."""
        return TaggedTensor(t, TensorType.INDICES)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.data.shape

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Size of the tensor, or of one dimension."""
        return self.data.size() if dim is None else self.data.size(dim)
