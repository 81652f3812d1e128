"""The parts that make a model: a norm, a body, and the sum with the input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..batch import Batch
from .linear import Codes, Product, Sum
from .norm import Norm

LaterBatch = Callable[[], Batch]
"""A batch that may not be there yet."""


class Body:
    """A layer between a norm and the residual sum.

    Attributes
    ----------
    invariant : bool
        Whether a row's result does not depend, bit for bit, on the other rows: see `invariance`.
    spec : AttentionSpec or LatentSpec or None
        The plan of its attention; None: it has none.
    """

    invariant = False
    spec: Any = None

    @property
    def takes_codes(self) -> bool:
        """Whether a product of 8-bit weights alone reads its input, which may then be `Codes`."""
        return False

    @property
    def takes_sums(self) -> bool:
        """Whether the first product that reads its input may get a `Sum` of one row."""
        return False

    @property
    def last(self) -> Product | None:
        """The product that makes its result of that of `before_last`; None: it has no such."""
        return None

    def before_last(
        self, x: torch.Tensor | Codes | Sum, batch: Batch, cache: Any
    ) -> torch.Tensor | Codes:
        """The rows that the last product multiplies, where its norm is computed with it."""
        raise NotImplementedError

    def page_shape(self, page_size: int) -> tuple[int, ...] | None:
        """Shape of a page of the cache; None: it keeps nothing of a token."""
        return None

    def new_state(self, slots: int, device: torch.device) -> tuple[torch.Tensor, ...] | None:
        """State of a request of any length, ``[slots, ...]`` each; None: it has none."""
        return None

    def __call__(self, x: torch.Tensor | Codes | Sum, batch: Batch, cache: Any) -> torch.Tensor:
        """Result for normalised rows; `cache` are its pages or its state."""
        raise NotImplementedError

    def parts(self, x: torch.Tensor, batch: LaterBatch, cache: Any) -> list[Callable[[], Any]]:
        """Calls that need other kernels and not each other's results; attention last."""
        return [lambda: self(x, batch(), cache)]


@dataclass
class Block:
    """``residual += after(body(norm(residual)))``.

    Attributes
    ----------
    norm : Norm
        Norm of the input.
    body : Body
        Attention, a recurrence, an MLP or a mixture.
    after : Norm or None
        Norm of the result, before it is added.
    """

    norm: Norm
    body: Body
    after: Norm | None = None
