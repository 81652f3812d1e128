"""Llama, Mistral, Qwen2 and Qwen3: attention with rotary embedding, and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .decoder import Decoder


class Llama(Decoder):
    """Attention over all tokens."""

    architectures = ("LlamaForCausalLM",)


class Mistral(Llama):
    """Attention over a window, if there is one."""

    architectures = ("MistralForCausalLM",)

    @classmethod
    def windows(cls, values: Mapping[str, Any]) -> tuple[int, ...]:
        size = values.get("sliding_window")
        # `sliding_window` counts the query's own position, `window_left` of the wrappers does not.
        return (-1 if size is None else size - 1,) * values["num_hidden_layers"]


class Qwen(Llama):
    """Windows in some layers, biases (Qwen2) or norms of queries and keys (Qwen3)."""

    architectures = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")

    @classmethod
    def windows(cls, values: Mapping[str, Any]) -> tuple[int, ...]:
        layers, size = values["num_hidden_layers"], values.get("sliding_window")
        if size is None or not values.get("use_sliding_window", False):
            return (-1,) * layers
        kinds = values.get("layer_types")
        if kinds is None:
            full = values.get("max_window_layers", layers)
            kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
        return tuple(size - 1 if kind == "sliding_attention" else -1 for kind in kinds[:layers])
