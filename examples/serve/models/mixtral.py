"""Mixtral: the attention of Mistral, and eight experts of which a token has two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..layers.body import Block, Body
from ..layers.division import Cuts
from ..layers.mixture import Mixture, SoftmaxRouter, take_experts
from .llama import Mistral

if TYPE_CHECKING:
    from ..config import ModelConfig

_NAMES = ("w1", "w3", "w2")


class Mixtral(Mistral):
    """Operations beyond Llama's: `cutlass_fused_moe`."""

    architectures = ("MixtralForCausalLM",)
    required = (*Mistral.required, "num_local_experts", "num_experts_per_tok")

    @classmethod
    def cuts(cls, config: ModelConfig) -> Cuts:
        return super().cuts(config) | Mixture.cuts(_NAMES)

    def layer(self, number: int, at: str) -> Iterator[Block]:
        yield Block(self.norm(f"{at}input_layernorm"), self.attention(number, f"{at}self_attn."))
        feed = self.feed(number, f"{at}block_sparse_moe.")
        yield Block(self.norm(f"{at}post_attention_layernorm"), feed)

    def feed(self, number: int, at: str) -> Body:
        config, values = self.config, self.config.values
        hidden, count = config.hidden_size, values["num_local_experts"]
        router = SoftmaxRouter(
            self.take.product(at, (("gate", count),), hidden), values["num_experts_per_tok"]
        )
        experts = take_experts(
            self.take, f"{at}experts.", count, hidden, config.intermediate_size, _NAMES
        )
        return Mixture(router, experts)
