"""What `config.json` of a Hugging Face folder says about a model, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import read_json
from .rope import read_rope, switch_length

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family.

    Attributes
    ----------
    windows : tuple of int
        One per layer: how many keys before its own position a query sees; -1: all.
    max_positions : int
        Longest text.
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
        values = read_json(path)
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = read_json(generation).get("eos_token_id")
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
        for name in _REQUIRED:
            if type(values.get(name)) is not int or values[name] < 1:
                raise ValueError(f"`{name}` must be an int of at least 1, got {values.get(name)!r}")
        heads = values["num_attention_heads"]
        head_dim = values.get("head_dim") or values["hidden_size"] // heads
        positions = values.get("max_position_embeddings") or 2048
        kv_heads = values.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(
                f"`num_attention_heads` must be a multiple of `num_key_value_heads` {kv_heads}, "
                f"got {heads}"
            )
        if head_dim % 16 or head_dim > 256:
            raise ValueError(f"`head_dim` must be a multiple of 16 up to 256, got {head_dim}")
        rope = read_rope(values, head_dim, positions)
        if rope["rope_type"] == "yarn":
            # Some state the original length here, others that after scaling.
            scaled = int(rope["factor"] * rope["original_max_position_embeddings"])
            positions = max(positions, scaled)
        eos = values.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            max_positions=positions,
            tied_embeddings=values.get("tie_word_embeddings", False),
            windows=_windows(architecture, values),
            rope=rope,
            eos_token_ids=frozenset([] if eos is None else eos if isinstance(eos, list) else [eos]),
        )

    def rotation(self, length: int) -> int:
        """First row, in the cosines and sines, of a text of this length: see `rope_cache`."""
        switch = switch_length(self.rope, self.max_positions)
        return self.max_positions if switch is not None and length > switch else 0


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
