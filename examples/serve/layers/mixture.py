"""Mixtures of experts: a router, the chosen experts, and experts that every token has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..batch import Batch
from .body import Body, LaterBatch
from .division import EXPERT_COLUMNS, EXPERT_ROWS, WHOLE, Cuts
from .experts import Experts, RoutedLayer
from .linear import Product, Sum, sum_parts, takes_sums
from .mlp import Mlp, SquaredMlp
from .weights import Weights

NAMES = ("gate_proj", "up_proj", "down_proj")
"""Matrices of an expert in most checkpoints."""


class Router(Protocol):
    """Chooses the experts of rows by their logits.

    Attributes
    ----------
    gate : Product
        Rows to logits of the experts.
    chosen : int
        Experts of a row.
    """

    gate: Product
    chosen: int

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of experts, ``[rows, chosen]`` float32 and int32."""


@dataclass
class SharedExpert:
    """An MLP that every token has, with a gate of its own or without."""

    mlp: Mlp | SquaredMlp
    gate: Product | None = None

    def parts(self, x: torch.Tensor, batch: LaterBatch) -> list[Callable[[], Any]]:
        """As `Body.parts`."""
        gate = [] if self.gate is None else [lambda: self(x)]
        return [*self.mlp.parts(x, batch, None), *gate]

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

    def __post_init__(self) -> None:
        self._layer: RoutedLayer | None = None

    @property
    def takes_sums(self) -> bool:
        return takes_sums(self.router.gate)

    def __call__(self, x: torch.Tensor | Sum, batch: Batch, cache: Any = None) -> torch.Tensor:
        if isinstance(x, Sum) and self._is_one_kernel:
            weights, numbers, _ = self._choose(x)
            x = x.normed
            out = self.experts(x, weights, numbers)
        else:
            logits = self.router.gate(x)
            x = x.normed if isinstance(x, Sum) else x
            out = self._routed(x, logits)
        return out if self.shared is None else out.add_(self.shared(x))

    def parts(self, x: torch.Tensor, batch: LaterBatch, cache: Any) -> list[Callable[[], Any]]:
        logits = x.new_zeros(len(x), len(self.experts.up))
        numbers = torch.arange(self.router.chosen, dtype=torch.int32, device=x.device)
        weights = x.new_ones(len(x), len(numbers), dtype=torch.float32)
        parts = [
            lambda: self.experts(x, weights, numbers.repeat(len(x), 1)),
            lambda: self._routed(x, logits),  # the same experts' kernels, and the router's
            lambda: self.router.gate(x),
            *sum_parts(self.router.gate, x, self._choose if self._is_one_kernel else None),
        ]
        if (shared := self.shared) is not None:
            parts += shared.parts(x, batch)
        return parts

    @property
    def _is_one_kernel(self) -> bool:
        """Whether the product of a `Sum` chooses experts, too."""
        return isinstance(self.router, SoftmaxRouter) and getattr(self.router.gate, "routes", False)

    def _choose(self, x: Sum) -> tuple[torch.Tensor, ...]:
        """Weights and numbers of experts, and logits."""
        router: Any = self.router
        return router.gate.route(x, router.chosen, router.renormalize)

    def _routed(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The experts' part, by one call for routers that it knows."""
        router = self.router
        if isinstance(router, SoftmaxRouter) and router.renormalize and self.experts.is_plain(x):
            if self._layer is None:
                self._layer = RoutedLayer(self.experts, router.chosen)
            return self._layer(x, logits)
        return self.experts(x, *router.choose(logits))


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

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
