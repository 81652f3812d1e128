"""Nemotron-H: Mamba-2, attention without positions, MLPs and mixtures, a norm before each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .. import kernels
from ..layers.attention import Rope
from ..layers.body import Block, Body
from ..layers.division import Cuts
from ..layers.experts import Experts
from ..layers.mamba import Mamba2
from ..layers.mixture import Mixture, SharedExpert
from ..layers.mlp import SquaredMlp
from .decoder import Decoder
from .deepseek import SigmoidRouter

if TYPE_CHECKING:
    from ..config import ModelConfig

_SIZES = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


class NemotronH(Decoder):
    """Operations beyond Llama's: `ssd_combined_fwd`, `selective_state_update` and, for mixtures,
    `fused_topk_deepseek` and `cutlass_fused_moe`."""

    architectures = ("NemotronHForCausalLM",)
    activations = ("relu2",)
    required = (*Decoder.required, *_SIZES)
    embedding_name = "backbone.embeddings"
    norm_name = "backbone.norm_f"

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        letters = values.get("hybrid_override_pattern")
        kinds = values.get("layers_block_type") or [_LETTERS[letter] for letter in letters or ""]
        kinds = [_KINDS.get(kind, kind) for kind in kinds]
        return {**values, "layers_block_type": kinds, "num_hidden_layers": len(kinds)}

    @classmethod
    def activation(cls, values: Mapping[str, Any]) -> str:
        return values.get("mlp_hidden_act", "relu2")

    @classmethod
    def cuts(cls, config: ModelConfig) -> Cuts:
        recurrence = Mamba2.cuts(*(config.values[name] for name in _SIZES))
        return super().cuts(config) | recurrence | Mixture.cuts()

    def blocks(self) -> Iterator[Block]:
        parts = {
            "linear_attention": self.recurrence,
            "full_attention": self.attention,
            "mlp": self.feed,
            "moe": self.mixture,
        }
        for number, kind in enumerate(self.config.values["layers_block_type"]):
            at = f"backbone.layers.{number}."
            yield Block(self.norm(f"{at}norm"), parts[kind](number, f"{at}mixer."))

    def rope_of(self, number: int) -> Rope | None:
        return None

    def feed(self, number: int, at: str) -> Body:
        return self._mlp(at, self.config.intermediate_size)

    def _mlp(self, at: str, inner: int) -> SquaredMlp:
        hidden, take = self.config.hidden_size, self.take
        up = take.product(at, (("up_proj", inner),), hidden)
        return SquaredMlp(up, take.product(at, (("down_proj", hidden),), inner))

    def mixture(self, number: int, at: str) -> Body:
        values, take, hidden = self.config.values, self.take, self.config.hidden_size
        if values.get("moe_latent_size"):
            raise ValueError("`moe_latent_size` must be null")
        count, inner = values["n_routed_experts"], values["moe_intermediate_size"]
        bias = take(f"{at}gate.e_score_correction_bias", count).float()
        router = SigmoidRouter(
            take.product(at, (("gate", count),), hidden),
            bias,
            values["num_experts_per_tok"],
            (values.get("n_group") or 1, values.get("topk_group") or 1),
            values.get("routed_scaling_factor", 1.0),
        )
        names = [
            (None, f"{at}experts.{n}.up_proj", f"{at}experts.{n}.down_proj") for n in range(count)
        ]
        experts: Experts = take.experts(names, hidden, inner)
        experts.options["activation_type"] = kernels.ActivationType.Relu2
        shared = self._mlp(f"{at}shared_experts.", values["moe_shared_expert_intermediate_size"])
        return Mixture(router, experts, SharedExpert(shared))

    def recurrence(self, number: int, at: str) -> Body:
        config, take = self.config, self.take
        heads, dim, groups, state = (config.values[name] for name in _SIZES)
        hidden, wide = config.hidden_size, heads * dim
        columns, width = wide + 2 * groups * state, config.values.get("conv_kernel", 4)
        ranks, bias = take.ranks, f"{at}conv1d.bias"
        heads_here = ranks.share("mamba_num_heads", heads)
        groups_here = ranks.share("n_groups", groups)
        return Mamba2(
            take.product(at, (("in_proj", wide + columns + heads),), hidden),
            take.product(at, (("out_proj", hidden),), wide),
            take.part(f"{at}conv1d.weight", columns, 1, width)[:, 0],
            take.part(bias, columns) if take.has(bias) else None,
            -take.part(f"{at}A_log", heads).float().exp(),
            take.part(f"{at}D", heads).float(),
            take.part(f"{at}dt_bias", heads).float(),
            take.part(f"{at}norm.weight", wide),
            heads_here,
            dim,
            groups_here,
            state,
            config.rms_norm_eps,
        )
