"""gpt-oss: attention with sinks and alternating windows, experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..layers.attention import Attention, AttentionSpec
from ..layers.body import Body
from ..layers.division import ROWS, WHOLE, Cut, Cuts, OfExperts
from ..layers.mixture import Experts, Mixture, SoftmaxRouter
from .decoder import Decoder

if TYPE_CHECKING:
    from ..config import ModelConfig

ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0
"""``g sigmoid(alpha g) (u + beta)``, the gate at most `LIMIT` and values at most that on both
sides."""


class GptOss(Decoder):
    """Operations beyond Llama's: `BatchAttentionWithAttentionSinkWrapper`, `cutlass_fused_moe` with
    biases and, for checkpoints of 4 bits, MXFP4 weights."""

    architectures = ("GptOssForCausalLM",)
    required = (*Decoder.required, "num_local_experts", "num_experts_per_tok", "head_dim")

    @classmethod
    def windows(cls, values: Mapping[str, Any]) -> tuple[int, ...]:
        layers, size = values["num_hidden_layers"], values.get("sliding_window") or 128
        kinds = values.get("layer_types") or ["sliding_attention", "full_attention"] * layers
        return tuple(size - 1 if kind == "sliding_attention" else -1 for kind in kinds[:layers])

    @classmethod
    def cuts(cls, config: ModelConfig) -> Cuts:
        """The first product's rows lie along axis 1, or 2 where products are transposed."""
        first, second = OfExperts(Cut(1), ROWS), OfExperts(Cut(2), ROWS)
        return super().cuts(config) | {
            "router": WHOLE,
            "experts.gate_up_proj": second,
            "experts.down_proj": first,
            "experts.gate_up_proj_bias": first,
            "experts.down_proj_bias": OfExperts(WHOLE, ROWS),  # the first rank adds it
            "experts.gate_up_proj_blocks": first,
            "experts.gate_up_proj_scales": first,
            "experts.down_proj_blocks": second,
            "experts.down_proj_scales": second,
        }

    def spec(self, number: int) -> AttentionSpec:
        return replace(super().spec(number), sinks=True)

    def attention(self, number: int, at: str) -> Body:
        body = super().attention(number, at)
        assert isinstance(body, Attention)
        body.sinks = self.take.part(f"{at}sinks", self.config.num_heads).float()
        return body

    def feed(self, number: int, at: str) -> Body:
        config, values, take = self.config, self.config.values, self.take
        hidden, inner, count = (
            config.hidden_size, config.intermediate_size, values["num_local_experts"],
        )  # fmt: skip
        here = len(take.ranks.experts(count))
        gate = take.product(at, (("router", count),), hidden)
        biases = take.part(f"{at}experts.gate_up_proj_bias", count, 2 * inner)
        options: dict[str, Any] = {
            "fc1_expert_biases": self._values_first(biases),
            "fc2_expert_biases": take.part(f"{at}experts.down_proj_bias", count, hidden),
        }
        numbers = {"alpha": ALPHA, "beta": BETA, "limit": LIMIT}
        numbers |= {n: values[f"swiglu_{n}"] for n in ("alpha", "limit") if f"swiglu_{n}" in values}
        for name, number_ in numbers.items():
            options[f"swiglu_{name}"] = torch.full((here,), number_, device=take.device)
        experts = self._experts(f"{at}experts.", count, hidden, inner)
        experts.options |= options | take.ranks.expert_options
        return Mixture(SoftmaxRouter(gate, values["num_experts_per_tok"]), experts)

    def _experts(self, at: str, count: int, hidden: int, inner: int) -> Experts:
        take = self.take
        if take.has(f"{at}gate_up_proj"):
            up = take.part(f"{at}gate_up_proj", count, hidden, 2 * inner).mT
            down = take.part(f"{at}down_proj", count, inner, hidden).mT
            return Experts(self._values_first(up), down.contiguous())
        # MXFP4: 32 elements of a row have 16 bytes and a scale.
        up, up_scale = take.mxfp4(f"{at}gate_up_proj", count, 2 * inner, hidden)
        down, down_scale = take.mxfp4(f"{at}down_proj", count, hidden, inner)
        scales = [self._values_first(up_scale), down_scale]
        options = {"use_w4_group_scaling": True, "quant_scales": scales}
        return Experts(self._values_first(up), down, options)

    @staticmethod
    def _values_first(rows: torch.Tensor) -> torch.Tensor:
        """Rows of gate and value in turn, as all values and then all gates."""
        return torch.cat([rows[:, 1::2], rows[:, ::2]], 1).contiguous()
