"""Shapes of models that people serve, with random weights made on the GPU: for measurements.

A shape that ends in ``cut`` has fewer layers than the model, so that one GPU holds it; each layer
is as the model's. Experts of DeepSeek V3 are in 8 bits and those of gpt-oss in 4, as published.
"""

from __future__ import annotations

from typing import Any

import torch

from .checkpoint import LARGE
from .config import ModelConfig
from .layers.weights import Weights
from .model import Model
from .parallel import Parallel

_COMMON: dict[str, Any] = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "eos_token_id": None}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LARGE,
    "llama-8b-fp8": {
        **LARGE,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "llama-70b-cut": {
        **LARGE,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 16,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "deepseek-v3-cut": {
        **_COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 8,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "gpt-oss-20b": {
        **_COMMON,
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "qwen3-next-cut": {
        **_COMMON,
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
}
"""Content of ``config.json`` by the name that the demo has for it."""

# Endings of tensors that a checkpoint of an architecture has, where others of its form have not.
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "Qwen3ForCausalLM": ("q_norm.weight", "k_norm.weight"),
    "Qwen3MoeForCausalLM": ("q_norm.weight", "k_norm.weight"),
    "Qwen2ForCausalLM": ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    "GptOssForCausalLM": (".bias",),
}


class RandomWeights(Weights):
    """The weights that a checkpoint could have, each made where a layer asks for it.

    Parameters
    ----------
    config : ModelConfig
        The configuration of the model that asks.
    device : str or torch.device
        Where they are.
    seed : int
        Seed of the random numbers.

    Attributes
    ----------
    shapes : dict
        Shape of each tensor that was made, by name.
    """

    def __init__(self, config: ModelConfig, device: str | torch.device, seed: int = 0) -> None:
        quantization = config.values.get("quantization_config") or {}
        super().__init__({}, torch.device(device), torch.bfloat16, quantization)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._has_blocks = quantization.get("quant_method") == "fp8"
        self._present = _OPTIONAL.get(config.architecture, ())
        if not config.tied_embeddings:
            self._present += ("lm_head.weight",)
        if self._has_blocks:
            self._present += (".weight_scale_inv",)
        if not quantization:
            self._present += (".gate_up_proj",)  # gpt-oss in 16 bits
        is_real = self.device.type != "meta"
        self._generator = torch.Generator(self.device).manual_seed(seed) if is_real else None

    def has(self, name: str) -> bool:
        return name.endswith(self._present)

    def optional(self, name: str, *shape: int) -> torch.Tensor | None:
        return self(name, *shape) if self.has(name) else None

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        self.shapes[name] = shape
        if name.endswith("_blocks"):
            return self._random(shape, torch.uint8)
        if name.endswith("_scales"):
            return torch.full(shape, 121, dtype=torch.uint8, device=self.device)  # 2^(121 - 127)
        if name.endswith("_scale_inv"):
            scale = (128 * shape[-1]) ** -0.5
            return torch.full(shape, scale, device=self.device)
        if len(shape) == 1:
            return self._random(shape).mul_(0.1).add_(1).bfloat16()  # norms scale by about 1
        if self._has_blocks and "_proj" in name and name.endswith(".weight"):
            return self._random(shape).to(torch.float8_e4m3fn)
        # Products keep the variance of their input.
        return self._random(shape).mul_(shape[-1] ** -0.5).bfloat16()

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        if self._generator is None:  # a draw without values takes a hundred times as long
            return torch.empty(shape, dtype=dtype, device=self.device)
        options: dict[str, Any] = {"device": self.device, "generator": self._generator}
        if dtype == torch.uint8:
            return torch.randint(256, shape, dtype=dtype, **options)
        return torch.randn(shape, dtype=dtype, **options)


def shape_config(name: str, layers: int | None = None) -> ModelConfig:
    """The configuration of a shape, with another number of layers if one is given."""
    values = SHAPES[name]
    return ModelConfig.from_dict(
        {**values, "num_hidden_layers": layers or values["num_hidden_layers"]}
    )


def random_model(
    config: ModelConfig, device: str | torch.device, parallel: Parallel | None = None
) -> Model:
    """A model of random bfloat16 weights, or of the configuration's 8 or 4 bits; of `parallel`,
    this rank's part."""
    return Model(config, RandomWeights(config, device), device, torch.bfloat16, parallel)
