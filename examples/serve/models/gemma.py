"""Gemma 2 and 3: alternating windows, norms before and after each part, and (2) capped logits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..layers.attention import AttentionSpec, Rope
from ..layers.body import Block
from ..rope import read_rope
from .decoder import Decoder


class Gemma(Decoder):
    """Operations beyond Llama's: `gemma_rmsnorm`, `gemma_fused_add_rmsnorm`, `gelu_tanh_and_mul`,
    attention with `logits_soft_cap` (Gemma 2) and heads of 256 elements."""

    activations = ("gelu_pytorch_tanh",)
    required = (*Decoder.required, "head_dim")
    plus_one = True
    tied = True

    @classmethod
    def activation(cls, values: Mapping[str, Any]) -> str:
        return values.get("hidden_activation") or "gelu_pytorch_tanh"

    @classmethod
    def pattern(cls, values: Mapping[str, Any]) -> int:
        """Number of layers of which the last one sees all tokens."""
        raise NotImplementedError

    @classmethod
    def windows(cls, values: Mapping[str, Any]) -> tuple[int, ...]:
        layers, size = values["num_hidden_layers"], values.get("sliding_window") or 4096
        every = cls.pattern(values)
        kinds = values.get("layer_types") or [
            "sliding_attention" if (number + 1) % every else "full_attention"
            for number in range(layers)
        ]
        return tuple(size - 1 if kind == "sliding_attention" else -1 for kind in kinds[:layers])

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        # As a number of the type of the activations, which is what the model was trained with.
        return x * torch.tensor(math.sqrt(self.config.hidden_size)).to(x.dtype).item()

    def layer(self, number: int, at: str) -> Iterator[Block]:
        norm = self.norm
        yield Block(
            norm(f"{at}input_layernorm"),
            self.attention(number, f"{at}self_attn."),
            norm(f"{at}post_attention_layernorm"),
        )
        yield Block(
            norm(f"{at}pre_feedforward_layernorm"),
            self.feed(number, f"{at}mlp."),
            norm(f"{at}post_feedforward_layernorm"),
        )

    def spec(self, number: int) -> AttentionSpec:
        values = self.config.values
        return replace(
            super().spec(number),
            scale=values.get("query_pre_attn_scalar", 256) ** -0.5,
            soft_cap=values.get("attn_logit_softcapping") or 0.0,
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        cap = self.config.values.get("final_logit_softcapping")
        return x if cap is None else torch.tanh(x.float() / cap) * cap


class Gemma2(Gemma):
    """Every second layer sees a window."""

    architectures = ("Gemma2ForCausalLM",)

    @classmethod
    def pattern(cls, values: Mapping[str, Any]) -> int:
        return 2


class Gemma3(Gemma):
    """One layer of six sees all tokens, with other frequencies; norms of queries and keys."""

    architectures = ("Gemma3ForCausalLM",)

    @classmethod
    def pattern(cls, values: Mapping[str, Any]) -> int:
        return values.get("_sliding_window_pattern") or values.get("sliding_window_pattern") or 6

    @classmethod
    def rope(cls, values: Mapping[str, Any], columns: int, positions: int) -> dict[str, Any]:
        return read_rope(cls._of_kind(values, "full_attention"), columns, positions)

    @classmethod
    def _of_kind(cls, values: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        """The configuration as if all layers were of a kind."""
        parameters = values.get("rope_parameters") or {}
        if kind in parameters:
            return {**values, "rope_parameters": parameters[kind]}
        if kind == "full_attention":
            return {"rope_theta": 1e6, **values}
        # Older files: windows have a base of their own, and are never scaled.
        return {"rope_theta": values.get("rope_local_base_freq") or 10000.0}

    def rope_of(self, number: int) -> Rope:
        config = self.config
        if config.windows[number] < 0:
            return self.shared_rope("full", config.rope)
        local = self._of_kind(config.values, "sliding_attention")
        rope = read_rope(local, config.rotary_columns, config.max_positions)
        return self.shared_rope("window", rope)
