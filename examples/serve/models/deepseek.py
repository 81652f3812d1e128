"""DeepSeek V2 and V3: latent attention, experts chosen by groups, and one that all tokens have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import kernels
from ..layers.attention import Rope
from ..layers.body import Block, Body
from ..layers.division import Cuts
from ..layers.latent import LatentAttention, LatentSpec
from ..layers.linear import Product
from ..layers.mixture import Mixture, SharedExpert, take_experts
from ..layers.mlp import Mlp
from .decoder import Decoder

if TYPE_CHECKING:
    from ..config import ModelConfig

_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


class DeepSeek(Decoder):
    """Operations beyond Llama's: `BatchMLAPagedAttentionWrapper`, `append_paged_mla_kv_cache`,
    `BatchPrefillWithRaggedKVCacheWrapper` with heads of 192 and 128 elements, `cutlass_fused_moe`
    and, for V3, `fused_topk_deepseek`."""

    required = (*Decoder.required, *_SIZES)

    @classmethod
    def head_dim(cls, values: Mapping[str, Any]) -> int:
        return values["qk_rope_head_dim"]  # the part that is cached for each token as it is

    @classmethod
    def cuts(cls, config: ModelConfig) -> Cuts:
        return super().cuts(config) | LatentAttention.cuts() | Mixture.cuts()

    def blocks(self) -> Iterator[Block]:
        yield from super().blocks()
        # Layers that guess further tokens.
        layers = self.config.num_layers
        for number in range(layers, layers + self.config.values.get("num_nextn_predict_layers", 0)):
            self.take.drop(f"model.layers.{number}.")

    def rope_of(self, number: int) -> Rope:
        neighbours = self.config.values.get("rope_interleave", True)
        return self.shared_rope("", self.config.rope, halves=not neighbours)

    def attention(self, number: int, at: str) -> Body:
        config, values, take = self.config, self.config.values, self.take
        latent, rotary, own, out = (values[name] for name in _SIZES)
        heads, hidden, rank = config.num_heads, config.hidden_size, values.get("q_lora_rank")
        queries = heads * (own + rotary)
        first = ("q_proj", queries) if rank is None else ("q_a_proj", rank)
        here = take.ranks.share("num_attention_heads", heads)
        up = take.matrix(f"{at}kv_b_proj", heads * (own + out), latent)
        return LatentAttention(
            LatentSpec(here, latent, rotary, own, out, self._scale(own + rotary)),
            take.product(at, (first, ("kv_a_proj_with_mqa", latent + rotary)), hidden),
            None if rank is None else self.norm(f"{at}q_a_layernorm", rank),
            None if rank is None else take.product(at, (("q_b_proj", queries),), rank),
            self.norm(f"{at}kv_a_layernorm", latent),
            up.view(here, own + out, latent),
            take.product(at, (("o_proj", hidden),), heads * out),
            self.rope_of(number),
        )

    def _scale(self, columns: int) -> float:
        """Factor of the logits; YaRN makes them larger for long contexts."""
        rope = self.config.rope
        temperature = 1.0
        if rope["rope_type"] == "yarn" and rope.get("mscale_all_dim"):
            temperature = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        return columns**-0.5 * temperature**2

    def feed(self, number: int, at: str) -> Body:
        config, values, take = self.config, self.config.values, self.take
        if number < values.get("first_k_dense_replace", 0):
            return super().feed(number, at)
        hidden, inner = config.hidden_size, values["moe_intermediate_size"]
        count = values["n_routed_experts"]
        shared = None
        if values.get("n_shared_experts"):
            width = inner * values["n_shared_experts"]
            shared = SharedExpert(Mlp.take(take, f"{at}shared_experts.", hidden, width))
        experts = take_experts(take, f"{at}experts.", count, hidden, inner)
        return Mixture(self.router(at, count), experts, shared)

    def router(self, at: str, count: int) -> Any:
        raise NotImplementedError


class DeepSeekV2(DeepSeek):
    """Softmax; a group counts what its best expert has."""

    architectures = ("DeepseekV2ForCausalLM",)

    def router(self, at: str, count: int) -> Any:
        values = self.config.values
        if values.get("norm_topk_prob"):
            raise ValueError("`norm_topk_prob` must be false")
        gate = self.take.product(at, (("gate", count),), self.config.hidden_size)
        groups, kept = values.get("n_group") or 1, values.get("topk_group") or 1
        if values.get("topk_method", "greedy") == "greedy":
            groups = kept = 1
        scale, chosen = values.get("routed_scaling_factor", 1.0), values["num_experts_per_tok"]
        return _GroupRouter(gate, chosen, groups, kept, scale)


class DeepSeekV3(DeepSeek):
    """Sigmoids, with a bias that balances the load; a group counts what its two best have."""

    architectures = ("DeepseekV3ForCausalLM",)

    def router(self, at: str, count: int) -> Any:
        values = self.config.values
        if not values.get("norm_topk_prob", True):
            raise ValueError("`norm_topk_prob` must be true")
        bias = self.take(f"{at}gate.e_score_correction_bias", count).float()
        gate = self.take.product(at, (("gate", count),), self.config.hidden_size)
        return SigmoidRouter(
            gate,
            bias,
            values["num_experts_per_tok"],
            (values.get("n_group") or 1, values.get("topk_group") or 1),
            values.get("routed_scaling_factor", 1.0),
        )


class _GroupRouter:
    """The experts with the largest shares of a softmax, within the best groups."""

    def __init__(self, gate: Product, chosen: int, groups: int, kept: int, scale: float) -> None:
        self.gate, self.chosen, self.groups, self.kept, self.scale = (
            gate, chosen, groups, kept, scale,
        )  # fmt: skip

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = logits.float().softmax(-1)
        if self.groups > 1:
            grouped = shares.unflatten(1, (self.groups, -1))
            best = grouped.amax(-1).topk(self.kept, dim=-1).indices
            keep = torch.zeros_like(grouped[..., 0]).scatter_(1, best, 1.0)
            shares = (grouped * keep[..., None]).flatten(1)
        weights, numbers = shares.topk(self.chosen, dim=-1)
        return weights * self.scale, numbers.int()


class SigmoidRouter:
    """`fused_topk_deepseek`."""

    def __init__(
        self, gate: Product, bias: torch.Tensor, chosen: int, groups: tuple[int, int], scale: float
    ) -> None:
        self.gate, self.bias, self.chosen = gate, bias, chosen
        self.groups, self.scale = groups, scale

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = len(logits), self.chosen
        weights = logits.new_empty(shape, dtype=torch.float32)
        numbers = logits.new_empty(shape, dtype=torch.int32)
        kernels.fused_moe.fused_topk_deepseek(
            logits, self.bias, *self.groups, self.chosen, self.scale, weights, numbers
        )
        return weights, numbers
