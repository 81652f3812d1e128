"""Small random checkpoints that `transformers` writes, and its logits for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.serve.tokens import BYTE_LEVEL_EOS, BYTE_LEVEL_FILE

SHAPE = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": BYTE_LEVEL_EOS,
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.12,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0],
    "original_max_position_embeddings": 64,
}

# Between them: every feature of a configuration that the loader reads.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama3": (
        "llama",
        {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("mistral", {"sliding_window": 9, "tie_word_embeddings": False}),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": _LINEAR}),
    "yarn": ("mistral", {"sliding_window": None, "rope_parameters": _YARN}),
    "dynamic": ("llama", {"rope_parameters": _DYNAMIC}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
}

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 2,
    "num_attention_heads": 2,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    **_EXPERTS,
}
_DEEPSEEK_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

# These are not rows of attention with rotary embedding and one MLP.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1], **_EXPERTS},
    ),
    "gemma2": (
        "gemma2",
        {
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            **_WINDOWS,
        },
    ),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 32, **_WINDOWS}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**_YARN, "truncate": False},
            **_WINDOWS,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "group_limited_greedy", **_LATENT},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {"q_lora_rank": 48, "rope_parameters": _DEEPSEEK_YARN, **_LATENT},
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "head_dim": 64,
            **_EXPERTS,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 2,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 1,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
            "time_step_min": 1e-9,  # which bounds time steps there, but not in checkpoints' use
            **_EXPERTS,
        },
    ),
}


def write(folder: Path, name: str, **changes: Any) -> Path:
    """Write a checkpoint of an architecture in bfloat16, with the byte-level tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, options = (ARCHITECTURES | FAMILIES)[name]
    config = AutoConfig.for_model(kind, **{**SHAPE, **options, **changes})
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Norms are made of ones, biases of zeros.
            if parameter.ndim == 1 or key.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    # Two files, as large models have.
    model.bfloat16().save_pretrained(folder, max_shard_size="60KB")
    (folder / BYTE_LEVEL_FILE).write_text(json.dumps({"eos": BYTE_LEVEL_EOS}))
    return folder


class Reference:
    """`transformers` in float32 on the weights of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[torch.dtype, Any] = {}

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[len(tokens), vocab]`` float32, with activations of `dtype`."""
        from transformers import AutoModelForCausalLM

        if dtype not in self.models:
            self.models[dtype] = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=dtype, attn_implementation="eager"
            ).eval()
        return self.models[dtype](torch.tensor([list(tokens)])).logits[0].float()

    def errors(self, tokens: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Error of `transformers` itself with activations of `dtype`, logit by logit."""
        return self.logits(tokens, dtype) - self.logits(tokens)

    def check_greedy(
        self, prompt: Sequence[int], tokens: Sequence[int], rounding: float
    ) -> tuple[int, int]:
        """Assert that `tokens` continue `prompt` greedily.

        Where the two largest logits are within twice `rounding`, the chosen token's must be within
        that of the largest; elsewhere it must be the largest's. Returns how many tokens were
        decided by the latter, and how many there were.
        """
        logits = self.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        chosen = torch.tensor(tokens)
        best = logits.topk(2).values
        decisive = best[:, 0] - best[:, 1] > 2 * rounding
        assert torch.equal(chosen[decisive], logits.argmax(-1)[decisive])
        behind = best[:, 0] - logits.gather(1, chosen[:, None])[:, 0]
        assert behind.max() <= 2 * rounding
        return int(decisive.sum()), len(tokens)
