"""Feed-forward layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import kernels
from ..batch import Batch
from ..invariance import in_tiles
from .body import Body, LaterBatch
from .division import COLUMNS, ROWS, Cuts
from .linear import (
    BLOCK,
    Codes,
    Fp8Blocks,
    Linear,
    Product,
    Sum,
    norm_parts,
    sum_parts,
    takes_sums,
)
from .weights import Weights

ACTIVATIONS = {"silu": "silu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}
"""By their names in checkpoints, the operations that multiply gate and values."""
MOST_GATED = 64
"""Rows up to which one kernel that multiplies, activates and rounds is faster than two."""


@dataclass
class Mlp(Body):
    """``down(act(gate(x)) * up(x))``.

    Attributes
    ----------
    up : Product
        Gate and values, one after the other.
    down : Product
        Back to the hidden size.
    activation : str
        Name of the operation.
    """

    up: Product
    down: Product
    activation: str = "silu_and_mul"
    invariant = True

    @staticmethod
    def cuts() -> Cuts:
        """Columns between the products are divided; those of `SquaredMlp`, too."""
        return {"gate_proj": ROWS, "up_proj": ROWS, "down_proj": COLUMNS}

    @staticmethod
    def take(take: Weights, at: str, hidden: int, inner: int, activation: str = "silu") -> Mlp:
        """Take the weights by the names that most checkpoints have."""
        return Mlp(
            take.product(at, (("gate_proj", inner), ("up_proj", inner)), hidden),
            take.product(at, (("down_proj", hidden),), inner),
            ACTIVATIONS[activation],
        )

    @property
    def takes_codes(self) -> bool:
        return isinstance(self.up, Fp8Blocks)

    @property
    def takes_sums(self) -> bool:
        return takes_sums(self.up)

    @property
    def last(self) -> Product:
        return self.down

    def rows(self, x: torch.Tensor | Codes | Sum) -> torch.Tensor:
        return self.down(self._inner(x))

    def before_last(
        self, x: torch.Tensor | Codes | Sum, batch: Batch, cache: Any = None
    ) -> torch.Tensor:
        inner = self._inner(x)
        assert isinstance(inner, torch.Tensor)
        return inner

    def _inner(self, x: torch.Tensor | Codes | Sum) -> torch.Tensor | Codes:
        if isinstance(x, Codes) and self._gates_codes(x):
            product = kernels.gemm.fp8_blockscale_gemm_swiglu_sm90
            up = self.up.weight, x.scales, self.up.scale
            return Codes(*product(x.numbers, *up, weight_ready=True))
        if isinstance(x, torch.Tensor) and self._gates(x):
            return self.up.gated(x)
        return self._activate(self.up(x))

    def _gates(self, x: torch.Tensor) -> bool:
        """Whether gate and values are one kernel with their activation."""
        silu = self.activation == "silu_and_mul" and not isinstance(self.down, Fp8Blocks)
        return silu and isinstance(self.up, Linear) and self.up.gates(len(x))

    def _gates_codes(self, x: Codes | torch.Tensor) -> bool:
        """Whether they are one kernel that rounds the activation, too."""
        return len(x) <= MOST_GATED and self._rounds

    @functools.cached_property
    def _rounds(self) -> bool:
        """Whether the package rounds the activation of 8-bit products where it multiplies."""
        return (
            isinstance(self.up, Fp8Blocks)
            and isinstance(self.down, Fp8Blocks)
            and self.up.bias is None
            and self.activation == "silu_and_mul"
            and len(self.up.weight) % (2 * BLOCK) == 0
            and hasattr(kernels.gemm, "fp8_blockscale_gemm_swiglu_sm90")
        )

    def _activate(self, x: torch.Tensor) -> torch.Tensor | Codes:
        """Values times gate, in 8 bits where a product of these follows."""
        name = f"{self.activation}_per_token_group_quant_8bit"
        if isinstance(self.down, Fp8Blocks) and hasattr(kernels.quantization, name):
            round_values = getattr(kernels.quantization, name)
            return Codes(*round_values(x, BLOCK, column_major_scales=True))
        return getattr(kernels, self.activation)(x)

    def parts(self, x: torch.Tensor, batch: LaterBatch, cache: Any) -> list[Callable[[], Any]]:
        gates = x.new_zeros(len(x), 2 * self.down.inputs)
        inner = x.new_zeros(len(x), self.down.inputs)
        calls: list[Callable[[], Any]] = [lambda: self.up(x), *sum_parts(self.up, x)]
        if self._gates(x):
            calls.append(lambda: self._inner(x))
        if self._gates_codes(x):
            codes = torch.zeros_like(x, dtype=torch.float8_e4m3fn)
            scales = x.new_zeros(len(x), self.up.inputs // BLOCK, dtype=torch.float32)
            calls.append(lambda: self._inner(Codes(codes, scales)))
        return [
            *calls,
            lambda: self.down(self._activate(gates)),
            *norm_parts(self.down, inner, x),
        ]

    def __call__(
        self, x: torch.Tensor | Codes | Sum, batch: Batch, cache: Any = None
    ) -> torch.Tensor:
        return in_tiles(batch.tile, self.rows, x)


@dataclass
class SquaredMlp(Body):
    """``down(relu(up(x)) ** 2)``."""

    up: Product
    down: Product
    invariant = True

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)).square())

    def __call__(self, x: torch.Tensor, batch: Batch, cache: Any = None) -> torch.Tensor:
        return in_tiles(batch.tile, self.rows, x)
