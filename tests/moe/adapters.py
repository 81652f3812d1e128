"""Random calls of LoRA in mixtures, and what loops over pairs in float64 make of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from flashinfer.fused_moe import fill_w_ptr

BF16 = torch.bfloat16


@dataclasses.dataclass
class Case:
    """Pairs in any order; some tokens have no adapter, some pairs no token or no expert."""

    x: torch.Tensor
    first: list[torch.Tensor]
    second: list[torch.Tensor]
    tokens: torch.Tensor
    experts: torch.Tensor
    adapters: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def random(
        cls,
        device: torch.device,
        *,
        tokens: int = 9,
        top_k: int = 3,
        adapters: int = 3,
        experts: int = 5,
        rank: int = 16,
        hidden: int = 72,
        columns: tuple[int, ...] = (40,),
        dtype: torch.dtype = BF16,
        index: torch.dtype = torch.int64,
        seed: int = 0,
    ) -> Case:
        torch.manual_seed(seed)
        pairs = tokens * top_k
        order = torch.randperm(pairs) // top_k
        chosen = torch.randint(0, experts, (pairs,))
        own = torch.randint(-1, adapters, (tokens,))
        if pairs > 8:
            order[1], order[5] = tokens + 4, -1
            chosen[2], chosen[3] = experts, -1
            own[tokens // 2] = adapters + 2
        case = cls(
            torch.randn(tokens, hidden).to(dtype),
            [torch.randn(adapters, experts, rank, hidden).to(dtype) / 8 for _ in columns],
            [torch.randn(adapters, experts, width, rank).to(dtype) / 4 for width in columns],
            order.to(index),
            chosen.to(index),
            own.to(index),
            torch.randn(pairs),
        )
        moved = {
            name: [w.to(device) for w in value] if isinstance(value, list) else value.to(device)
            for name, value in vars(case).items()
        }
        return cls(**moved)._without_unused()

    def _without_unused(self) -> Case:
        """Matrices that no pair has are NaN: reading one is seen in every result."""
        used = {matrix for matrix in map(self.matrix, range(len(self.tokens))) if matrix}
        for adapter in range(self.first[0].shape[0]):
            for expert in range(self.first[0].shape[1]):
                if (adapter, expert) not in used:
                    for weight in (*self.first, *self.second):
                        weight[adapter, expert] = float("nan")
        return self

    def matrix(self, pair: int) -> tuple[int, int] | None:
        """Adapter and expert of a pair."""
        token, expert = int(self.tokens[pair]), int(self.experts[pair])
        if not 0 <= token < self.adapters.shape[0]:
            return None
        adapter = int(self.adapters[token])
        adapters, experts = self.first[0].shape[:2]
        exists = 0 <= adapter < adapters and 0 <= expert < experts
        return (adapter, expert) if exists else None

    def pairs(self) -> dict[str, torch.Tensor]:
        return {
            "sorted_token_ids": self.tokens,
            "expert_ids": self.experts,
            "lora_indices": self.adapters,
        }

    def call(self) -> dict[str, Any]:
        """Arguments of `bgmv_moe`."""
        return {
            "x": self.x,
            "lora_a_weights": self.first,
            "lora_b_weights": self.second,
            **self.pairs(),
            "topk_weights": self.weights,
            "num_experts": self.first[0].shape[1],
        }

    def shrunk(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """``[slices, pairs, rank]``, float64: `rows`, or the tokens' x, times the first weights."""
        out = torch.zeros(len(self.first), len(self.tokens), self.first[0].shape[2])
        out = out.double().to(self.x.device)
        for s, weight in enumerate(self.first):
            for pair in range(len(self.tokens)):
                if matrix := self.matrix(pair):
                    row = self.x[int(self.tokens[pair])] if rows is None else rows[pair]
                    out[s, pair] = weight[matrix].double() @ row.double()
        return out

    def expanded(self, x: torch.Tensor) -> torch.Tensor:
        """``[pairs, columns]``, float64: rows of `x` times the second weights, side by side."""
        widths = [weight.shape[2] for weight in self.second]
        out = torch.zeros(len(self.tokens), sum(widths)).double().to(x.device)
        for pair in range(len(self.tokens)):
            if matrix := self.matrix(pair):
                parts = [
                    w[matrix].double() @ x[s, pair].double() for s, w in enumerate(self.second)
                ]
                out[pair] = torch.cat(parts)
        return out

    def summed(self, rows: torch.Tensor) -> torch.Tensor:
        """``[tokens, columns]``, float64: weighted rows of pairs."""
        out = torch.zeros(self.x.shape[0], rows.shape[1]).double().to(rows.device)
        for pair in range(len(self.tokens)):
            if self.matrix(pair):
                out[int(self.tokens[pair])] += float(self.weights[pair]) * rows[pair]
        return out

    def starts(self) -> torch.Tensor:
        widths = [weight.shape[2] for weight in self.second]
        starts = [sum(widths[:s]) for s in range(len(widths))]
        return torch.tensor(starts, device=self.x.device)


def table_of(weights: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """A table that stands for all slices, and its stride."""
    experts = weights[0].shape[1]
    table = torch.zeros(len(weights), experts, dtype=torch.int64, device=weights[0].device)
    strides = [fill_w_ptr(table, weight, experts, s) for s, weight in enumerate(weights)]
    return table, strides[0]


def assert_near(out: torch.Tensor, target: torch.Tensor, limit: float = 0.01) -> None:
    assert out.shape == target.shape and not bool(out.isnan().any())
    error = float((out.double() - target).norm())
    assert error <= limit * float(target.norm()), error / float(target.norm())
