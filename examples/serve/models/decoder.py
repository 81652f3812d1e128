"""The common form of models: attention and a feed-forward layer in turn, each with a norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..layers.attention import Attention, AttentionSpec, Rope
from ..layers.body import Block, Body
from ..layers.division import WHOLE, Cuts
from ..layers.mlp import Mlp
from ..layers.norm import Norm
from ..layers.weights import Weights
from ..rope import read_rope, rope_cache

if TYPE_CHECKING:
    from ..config import ModelConfig


class Decoder:
    """A decoder of the Llama family; a model changes the parts in which it differs.

    Parameters
    ----------
    config : ModelConfig
        Shapes.
    take : Weights
        Tensors of its checkpoint.

    Attributes
    ----------
    architectures : tuple of str
        Names in ``config.json`` that this class serves.
    activations : tuple of str
        Values of ``hidden_act`` that it serves, the default first.
    required : tuple of str
        Positive integers that ``config.json`` must have.
    tied : bool
        Whether embedding and last product have one matrix where ``config.json`` does not say.
    plus_one : bool
        Whether its norms multiply by ``1 + weight``.
    embedding_name, norm_name : str
        Names of the tensors before and after the layers.
    """

    architectures: ClassVar[tuple[str, ...]] = ()
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    required: ClassVar[tuple[str, ...]] = ("intermediate_size", "num_attention_heads")
    tied = False
    plus_one = False
    embedding_name = "model.embed_tokens"
    norm_name = "model.norm"

    def __init__(self, config: ModelConfig, take: Weights) -> None:
        self.config, self.take = config, take
        self._ropes: dict[str, Rope] = {}

    # These read `config.json`.

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """With what follows from the rest."""
        return values

    @classmethod
    def activation(cls, values: Mapping[str, Any]) -> str:
        return values.get("hidden_act", cls.activations[0])

    @classmethod
    def head_dim(cls, values: Mapping[str, Any]) -> int:
        """Columns of a head's queries, keys and values."""
        return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]

    @classmethod
    def rotary_columns(cls, values: Mapping[str, Any], head_dim: int) -> int:
        """Columns of a head that turn."""
        return head_dim

    @classmethod
    def rope(cls, values: Mapping[str, Any], columns: int, positions: int) -> dict[str, Any]:
        """The rotary embedding of layers that have no other."""
        return read_rope(values, columns, positions)

    @classmethod
    def windows(cls, values: Mapping[str, Any]) -> tuple[int, ...]:
        """How many keys before its own position a query sees, in each layer; -1: all."""
        return (-1,) * values["num_hidden_layers"]

    @classmethod
    def cuts(cls, config: ModelConfig) -> Cuts:
        """How ranks divide its matrices, and those of its other tensors that they divide."""
        outer: Cuts = {cls.embedding_name: WHOLE}
        return outer | Attention.cuts(config.num_kv_heads) | Mlp.cuts()

    # These make the model.

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Change the result of the embedding."""
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Change the result of the last product, in float32 if at all."""
        return x

    def blocks(self) -> Iterator[Block]:
        """Every part of the model that has a residual sum, in order."""
        for number in range(self.config.num_layers):
            yield from self.layer(number, f"model.layers.{number}.")

    def layer(self, number: int, at: str) -> Iterator[Block]:
        yield Block(self.norm(f"{at}input_layernorm"), self.attention(number, f"{at}self_attn."))
        yield Block(self.norm(f"{at}post_attention_layernorm"), self.feed(number, f"{at}mlp."))

    def attention(self, number: int, at: str) -> Body:
        config, take, spec = self.config, self.take, self.spec(number)
        hidden, dim = config.hidden_size, spec.dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        return Attention(
            spec,
            take.product(at, (("q_proj", q), ("k_proj", kv), ("v_proj", kv)), hidden),
            take.product(at, (("o_proj", hidden),), q),
            self.rope_of(number),
            self.optional_norm(f"{at}q_norm", dim),
            self.optional_norm(f"{at}k_norm", dim),
            **self.cache_scales(at),
        )

    def feed(self, number: int, at: str) -> Body:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        return Mlp.take(self.take, at, hidden, inner, config.activation)

    def spec(self, number: int) -> AttentionSpec:
        config, ranks = self.config, self.take.ranks
        heads = ranks.share("num_attention_heads", config.num_heads)
        kv_heads = ranks.share("num_key_value_heads", config.num_kv_heads, shared=True)
        return AttentionSpec(heads, kv_heads, config.head_dim, config.windows[number])

    def rope_of(self, number: int) -> Rope | None:
        return self.shared_rope("", self.config.rope)

    # These make its smallest parts.

    def shared_rope(self, name: str, rope: Mapping[str, Any], halves: bool = True) -> Rope:
        """Cosines and sines, made once for all layers that name them."""
        if name not in self._ropes:
            config = self.config
            table = rope_cache(dict(rope), config.rotary_columns, config.max_positions)
            self._ropes[name] = Rope(table.to(self.take.device), halves)
        return self._ropes[name]

    def norm(self, name: str, columns: int | None = None) -> Norm:
        columns = self.config.hidden_size if columns is None else columns
        return self.take.norm(name, columns, self.config.rms_norm_eps, self.plus_one)

    def cache_scales(self, at: str) -> dict[str, float]:
        """Calibrated factors of keys and values of an 8-bit cache, by the names they have had."""
        take, scales = self.take, {}
        for part in ("k", "v"):
            scale = take.number(
                f"{at}{part}_scale", f"{at}attn.{part}_scale", f"{at}{part}_proj.{part}_scale",
                f"{at}{part}_proj.output_scale",
            )  # fmt: skip
            if scale is not None:
                scales[f"{part}_scale"] = scale
        return scales

    def optional_norm(self, name: str, columns: int) -> Norm | None:
        return self.norm(name, columns) if self.take.has(f"{name}.weight") else None
