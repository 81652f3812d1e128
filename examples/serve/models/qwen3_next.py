"""Qwen3-Next: the gated delta rule in three layers of four, gated attention in the fourth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..layers.attention import Attention
from ..layers.body import Block, Body
from ..layers.delta import GatedDelta
from ..layers.division import WHOLE, Cuts
from ..layers.mixture import Mixture, SharedExpert
from ..layers.mlp import Mlp
from .qwen3_moe import Qwen3Moe

if TYPE_CHECKING:
    from ..config import ModelConfig

_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


class Qwen3Next(Qwen3Moe):
    """Operations beyond Qwen3-MoE's: `gemma_rmsnorm`, `chunk_gated_delta_rule` and
    `gated_delta_rule_mtp`."""

    architectures = ("Qwen3NextForCausalLM",)
    required = (*Qwen3Moe.required, *_SIZES, "head_dim", "shared_expert_intermediate_size")
    plus_one = True

    @classmethod
    def rotary_columns(cls, values: Mapping[str, Any], head_dim: int) -> int:
        given = values.get("rope_parameters") or {}
        share = given.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 0.25
        return int(head_dim * share)

    @classmethod
    def rope(cls, values: Mapping[str, Any], columns: int, positions: int) -> dict[str, Any]:
        whole = {k: v for k, v in values.items() if k != "partial_rotary_factor"}
        if given := whole.get("rope_parameters"):
            whole["rope_parameters"] = {**given, "partial_rotary_factor": None}
        return super().rope(whole, columns, positions)

    @classmethod
    def cuts(cls, config: ModelConfig) -> Cuts:
        key_heads, value_heads, key_dim, value_dim = (config.values[name] for name in _SIZES)
        recurrence = GatedDelta.cuts(key_heads * key_dim, value_heads * value_dim)
        return super().cuts(config) | recurrence | {"shared_expert_gate": WHOLE}

    def layer(self, number: int, at: str) -> Iterator[Block]:
        values = self.config.values
        every = values.get("full_attention_interval", 4)
        kinds = values.get("layer_types")
        is_full = kinds[number] == "full_attention" if kinds else (number + 1) % every == 0
        mixer = (
            self.attention(number, f"{at}self_attn.") if is_full
            else self.recurrence(f"{at}linear_attn.")
        )  # fmt: skip
        yield Block(self.norm(f"{at}input_layernorm"), mixer)
        yield Block(self.norm(f"{at}post_attention_layernorm"), self.feed(number, f"{at}mlp."))

    def attention(self, number: int, at: str) -> Body:
        """Each head's queries come with a gate."""
        take, spec, hidden = self.take, self.spec(number), self.config.hidden_size
        q, kv = self.config.num_heads * spec.dim, self.config.num_kv_heads * spec.dim
        return Attention(
            spec,
            take.product(at, (("q_proj", 2 * q), ("k_proj", kv), ("v_proj", kv)), hidden),
            take.product(at, (("o_proj", hidden),), q),
            self.rope_of(number),
            self.norm(f"{at}q_norm", spec.dim),
            self.norm(f"{at}k_norm", spec.dim),
            gated=True,
            **self.cache_scales(at),
        )

    def recurrence(self, at: str) -> Body:
        config, take = self.config, self.take
        key_heads, value_heads, key_dim, value_dim = (config.values[name] for name in _SIZES)
        hidden, keys, outs = config.hidden_size, key_heads * key_dim, value_heads * value_dim
        width = config.values.get("linear_conv_kernel_dim", 4)
        columns = 2 * keys + outs
        keys_here = take.ranks.share("linear_num_key_heads", key_heads)
        values_here = take.ranks.share("linear_num_value_heads", value_heads)
        return GatedDelta(
            take.product(at, (("in_proj_qkvz", 2 * keys + 2 * outs),), hidden),
            take.product(at, (("in_proj_ba", 2 * value_heads),), hidden),
            take.product(at, (("out_proj", hidden),), outs),
            take.part(f"{at}conv1d.weight", columns, 1, width)[:, 0],
            take.part(f"{at}A_log", value_heads).float(),
            take.part(f"{at}dt_bias", value_heads).float(),
            take(f"{at}norm.weight", value_dim),
            keys_here,
            values_here,
            key_dim,
            value_dim,
            config.rms_norm_eps,
        )

    def mixture(self, at: str) -> Mixture:
        mixture, config = super().mixture(at), self.config
        hidden, inner = config.hidden_size, config.values["shared_expert_intermediate_size"]
        mlp = Mlp.take(self.take, f"{at}shared_expert.", hidden, inner)
        gate = self.take.product(at, (("shared_expert_gate", 1),), hidden)
        mixture.shared = SharedExpert(mlp, gate)
        return mixture
