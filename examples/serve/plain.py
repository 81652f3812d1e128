"""A Llama in plain PyTorch, written from the formulas: what the engine is checked against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from .config import ModelConfig


class PlainModel:
    """The forward pass over a whole text, without cache or batch.

    Parameters
    ----------
    config : ModelConfig
        Configuration of a Llama without scaled RoPE, biases or windows.
    tensors : mapping
        Of its checkpoint, by name; their dtype is that of the arithmetic.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        if config.architecture != "LlamaForCausalLM" or config.rope["rope_type"] != "default":
            raise ValueError(f"`config` must be of a Llama without scaled RoPE, got {config}")
        self._config, self._tensors = config, tensors

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after each token, ``[len(tokens), vocab]``."""
        config, weights = self._config, self._tensors
        table = weights["model.embed_tokens.weight"]
        x = embedding(torch.tensor(tokens), table)
        for layer in range(config.num_layers):
            at = f"model.layers.{layer}."
            x = x + self._attention(f"{at}self_attn.", self._norm(f"{at}input_layernorm.weight", x))
            y = self._norm(f"{at}post_attention_layernorm.weight", x)
            gate, up = (
                linear(y, weights[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up")
            )
            x = x + linear(silu(gate) * up, weights[f"{at}mlp.down_proj.weight"])
        head = table if config.tied_embeddings else weights["lm_head.weight"]
        return linear(self._norm("model.norm.weight", x), head)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self._tensors[name], self._config.rms_norm_eps)

    def _attention(self, at: str, x: torch.Tensor) -> torch.Tensor:
        def heads(name: str) -> torch.Tensor:
            """``[heads, tokens, head_dim]``."""
            rows = linear(x, self._tensors[f"{at}{name}_proj.weight"])
            return rows.view(len(x), -1, self._config.head_dim).transpose(0, 1)

        q, k, v = self._rotated(heads("q")), self._rotated(heads("k")), heads("v")
        group = len(q) // len(k)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(out.transpose(0, 1).flatten(1), self._tensors[f"{at}o_proj.weight"])

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Element i of the first half of a head and of its second turn by position * theta^-i/n."""
        half = x.shape[-1] // 2
        frequency = self._config.rope["rope_theta"] ** (-torch.arange(half) / half)
        angle = torch.arange(x.shape[1])[:, None] * frequency
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
