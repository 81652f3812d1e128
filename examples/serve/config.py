"""Reads and checks `config.json` of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import read_json
from .layers.formats import check_quantization
from .models import architectures
from .rope import switch_length

_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers")


@dataclass(frozen=True)
class ModelConfig:
    """What all models have; a model reads the rest from `values`.

    Attributes
    ----------
    head_dim : int
        Columns of a head in the cache.
    rotary_columns : int
        Columns of a head that turn with the position.
    activation : str
        Activation of the feed-forward layers, by its name in checkpoints.
    windows : tuple of int
        One per layer: how many keys before its own position a query sees; -1: all.
    max_positions : int
        Longest text.
    rope : mapping
        ``rope_type``, ``rope_theta`` and the parameters of that type.
    eos_token_ids : frozenset of int
        Any of these ends a text.
    values : mapping
        Content of ``config.json``.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_columns: int
    activation: str
    rms_norm_eps: float
    max_positions: int
    tied_embeddings: bool
    windows: tuple[int, ...]
    rope: Mapping[str, Any]
    eos_token_ids: frozenset[int]
    values: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

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
        models = architectures()
        if architecture not in models:
            raise ValueError(
                f"`architectures` must be one of {', '.join(models)}, got {architecture!r}"
            )
        model = models[architecture]
        values = model.complete(values)
        activation = model.activation(values)
        if activation not in model.activations:
            allowed = " or ".join(map(repr, model.activations))
            raise ValueError(f"`hidden_act` must be {allowed}, got {activation!r}")
        check_quantization(values)
        for name in (*_REQUIRED, *model.required):
            if type(values.get(name)) is not int or values[name] < 1:
                raise ValueError(f"`{name}` must be an int of at least 1, got {values.get(name)!r}")
        heads = values["num_attention_heads"]
        head_dim = model.head_dim(values)
        positions = values.get("max_position_embeddings") or 2048
        kv_heads = values.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(
                f"`num_attention_heads` must be a multiple of `num_key_value_heads` {kv_heads}, "
                f"got {heads}"
            )
        if head_dim % 16 or head_dim > 256:
            raise ValueError(f"`head_dim` must be a multiple of 16 up to 256, got {head_dim}")
        columns = model.rotary_columns(values, head_dim)
        rope = model.rope(values, columns, positions)
        if rope.get("rope_type") == "yarn":
            # Some state the original length here, others that after scaling.
            scaled = int(rope["factor"] * rope["original_max_position_embeddings"])
            positions = max(positions, scaled)
        eos = values.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values.get("intermediate_size") or 0,
            num_layers=values["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_columns=columns,
            activation=activation,
            rms_norm_eps=values.get("rms_norm_eps", values.get("layer_norm_epsilon", 1e-6)),
            max_positions=positions,
            tied_embeddings=values.get("tie_word_embeddings", model.tied),
            windows=model.windows(values),
            rope=rope,
            eos_token_ids=frozenset([] if eos is None else eos if isinstance(eos, list) else [eos]),
            values=values,
        )

    def rotation(self, length: int) -> int:
        """First row, in the cosines and sines, of a text of this length: see `rope_cache`."""
        switch = switch_length(self.rope, self.max_positions)
        return self.max_positions if switch is not None and length > switch else 0
