"""Mixtures of experts: a router, the chosen experts, and experts that every token has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..batch import Batch
from .body import Body
from .division import EXPERT_COLUMNS, EXPERT_ROWS, WHOLE, Cuts
from .experts import Experts
from .linear import Product
from .mlp import Mlp, SquaredMlp
from .weights import Weights

NAMES = ("gate_proj", "up_proj", "down_proj")
"""Matrices of an expert in most checkpoints."""


class Router(Protocol):
    """Rows to weights and numbers of their experts, ``[rows, chosen]`` float32 and int32."""

    chosen: int

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass
class SharedExpert:
    """An MLP that every token has, with a gate of its own or without."""

    mlp: Mlp | SquaredMlp
    gate: Product | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mlp.rows(x)
        return out if self.gate is None else out * self.gate(x).sigmoid()


@dataclass
class Mixture(Body):
    """The weighted sum of the chosen experts, and what every token has."""

    router: Router
    experts: Experts
    shared: SharedExpert | None = None

    @staticmethod
    def cuts(names: tuple[str, str, str] = NAMES) -> Cuts:
        """Columns between the products of each expert are divided, or experts."""
        gate, up, down = (f"experts.*.{name}" for name in names)
        return {"gate": WHOLE, gate: EXPERT_ROWS, up: EXPERT_ROWS, down: EXPERT_COLUMNS}

    @property
    def chosen(self) -> int:
        """Experts of a token."""
        return self.router.chosen

    def __call__(self, x: torch.Tensor, batch: Batch, cache: Any = None) -> torch.Tensor:
        out = self.experts(x, *self.router(x))
        return out if self.shared is None else out.add_(self.shared(x))


@dataclass
class SoftmaxRouter:
    """The experts with the largest logits.

    Attributes
    ----------
    gate : Product
        Rows to logits of the experts.
    chosen : int
        Experts of a token.
    renormalize : bool
        Whether the weights of a token's experts sum to 1; else they are the shares of a softmax
        over all experts.
    """

    gate: Product
    chosen: int
    renormalize: bool = True

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate(x)
        # The sum over experts needs no order, and sorting takes as long as choosing.
        best, numbers = logits.topk(self.chosen, dim=-1, sorted=False)
        if self.renormalize:
            weights = best.softmax(-1, dtype=torch.float32)
        else:
            weights = (best.float() - logits.float().logsumexp(-1, keepdim=True)).exp()
        return weights, numbers.int()


def take_experts(
    take: Weights,
    at: str,
    count: int,
    hidden: int,
    inner: int,
    names: tuple[str, str, str] = NAMES,
) -> Experts:
    """Experts that have a matrix each for gate, values and the way back."""
    gate, up, down = names
    return take.experts(
        [
            (f"{at}{expert}.{gate}", f"{at}{expert}.{up}", f"{at}{expert}.{down}")
            for expert in range(count)
        ],
        hidden,
        inner,
    )
