"""Qwen3-MoE: the attention of Qwen3, and in most layers many small experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layers.body import Body
from ..layers.division import Cuts
from ..layers.mixture import Mixture, SoftmaxRouter, take_experts
from .llama import Qwen

if TYPE_CHECKING:
    from ..config import ModelConfig


class Qwen3Moe(Qwen):
    """Operations beyond Llama's: `cutlass_fused_moe`."""

    architectures = ("Qwen3MoeForCausalLM",)
    required = (*Qwen.required, "num_experts_per_tok", "moe_intermediate_size")

    @classmethod
    def cuts(cls, config: ModelConfig) -> Cuts:
        return super().cuts(config) | Mixture.cuts()

    @property
    def experts(self) -> int:
        values = self.config.values
        # Files of the current `transformers` have the second name.
        return values.get("num_experts") or values["num_local_experts"]

    def is_sparse(self, number: int) -> bool:
        """Whether a layer has experts, rather than one MLP."""
        values = self.config.values
        step = values.get("decoder_sparse_step", 1)
        return number not in values.get("mlp_only_layers", ()) and (number + 1) % step == 0

    def feed(self, number: int, at: str) -> Body:
        return self.mixture(at) if self.is_sparse(number) else super().feed(number, at)

    def mixture(self, at: str) -> Mixture:
        values, hidden = self.config.values, self.config.hidden_size
        router = SoftmaxRouter(
            self.take.product(at, (("gate", self.experts),), hidden),
            values["num_experts_per_tok"],
            values.get("norm_topk_prob", False),
        )
        inner = values["moe_intermediate_size"]
        experts = take_experts(self.take, f"{at}experts.", self.experts, hidden, inner)
        return Mixture(router, experts)
