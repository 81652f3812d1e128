"""Random tensors of the fuzzers of recurrent layers: packed tokens, pools of states, and slots."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

FULL_EXAMPLES = 2500
"""Cases of a fuzzer under `--full`: the references walk tokens in float64."""


class Source:
    """Draws tensors; the same seed gives the same ones."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        unit = torch.rand(shape, generator=self.generator, device=self.device)
        return unit * (high - low) + low

    def heads(self, *shape: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
        """`[..., heads, dim]`, between whose tokens lie `gap` heads of no tensor."""
        *tokens, count, dim = shape
        return self.normal(*tokens, count + gap, dim, dtype=dtype)[..., :count, :]

    def pool(self, *shape: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
        """`[slots, heads, rows, row]`, between whose slots lie `gap` heads of no tensor."""
        slots, count, *matrix = shape
        return self.normal(slots, count + gap, *matrix, dtype=dtype)[:, :count]

    def slots(self, count: int, of: int, dtype: torch.dtype, padding: bool) -> torch.Tensor:
        """Distinct slots, of which some are -1 with `padding`."""
        found = torch.randperm(of, generator=self.generator, device=self.device)[:count]
        if padding:
            found = torch.where(self.uniform(0, 1, count) < 0.3, -1, found)
        return found.to(dtype)


def bounds_of(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Where sequences of these lengths begin when they lie one after the other."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)
