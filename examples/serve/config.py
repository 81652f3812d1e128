"""What `config.json` of a Hugging Face folder says about a model, checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family.

    Attributes
    ----------
    windows : tuple of int
        One per layer: how many keys before its own position a query sees; -1: all.
    rope : mapping
        ``rope_type``, ``rope_theta`` and the parameters of that type.
    eos_token_ids : frozenset of int
        Any of these ends a text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tied_embeddings: bool
    windows: tuple[int, ...]
    rope: Mapping[str, Any]
    eos_token_ids: frozenset[int]

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``config.json``; of ``generation_config.json`` the end-of-text tokens.

        Raises
        ------
        ValueError
            If the folder has no ``config.json``, or it asks for something not implemented.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(f"`model` must be a folder with a config.json, got {str(folder)!r}")
        values = json.loads(path.read_text())
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = json.loads(generation.read_text()).get("eos_token_id")
            values["eos_token_id"] = values.get("eos_token_id") if eos is None else eos
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The content of a ``config.json``, of this or the previous major `transformers`.

        Raises
        ------
        ValueError
            If it asks for something not implemented here.
        """
        architecture = (values.get("architectures") or ["none"])[0]
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"`architectures` must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}"
            )
        activation = values.get("hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f"`hidden_act` must be 'silu', got {activation!r}")
        if values.get("quantization_config"):
            raise ValueError("`quantization_config` must be absent: weights are 16-bit here")
        heads = values["num_attention_heads"]
        eos = values.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            max_positions=values.get("max_position_embeddings", 2048),
            tied_embeddings=values.get("tie_word_embeddings", False),
            windows=_windows(architecture, values),
            rope=_rope(values),
            eos_token_ids=frozenset([] if eos is None else eos if isinstance(eos, list) else [eos]),
        )


def _windows(architecture: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    layers, size = values["num_hidden_layers"], values.get("sliding_window")
    if architecture == "LlamaForCausalLM" or size is None:
        return (-1,) * layers
    # `sliding_window` counts the query's own position, `window_left` of the wrappers does not.
    if architecture == "MistralForCausalLM":
        return (size - 1,) * layers
    if not values.get("use_sliding_window", False):
        return (-1,) * layers
    kinds = values.get("layer_types")
    if kinds is None:
        full = values.get("max_window_layers", layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    return tuple(size - 1 if kind == "sliding_attention" else -1 for kind in kinds[:layers])


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    rope.setdefault("rope_theta", values.get("rope_theta", 10000.0))
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"`rope_type` must be 'default', 'linear' or 'llama3', got {kind!r}")
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"`partial_rotary_factor` must be 1, got {partial}")
    return rope


def rope_cache(config: ModelConfig) -> torch.Tensor:
    """Cosines and sines of every position, ``[max_positions, head_dim]`` float32.

    ``llama3`` divides frequencies of few periods in the original context by `factor`, keeps those
    of many, and interpolates between ("The Llama 3 Herd of Models", 2024).
    """
    rope, dim = config.rope, config.head_dim
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequency = float(rope["rope_theta"]) ** -exponent
    if rope["rope_type"] == "linear":
        frequency = frequency / rope["factor"]
    elif rope["rope_type"] == "llama3":
        periods = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((periods - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / rope["factor"])
    angle = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], -1).float()
