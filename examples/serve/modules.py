"""The modules that an engine's requests may need: known beforehand, compiled at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashinfer.jit import JitSpec, current_compilation_context
from flashinfer.jit.activation import gen_act_and_mul_module
from flashinfer.jit.attention import (
    AttentionConfig,
    choose_tile_q,
    gen_attention_module,
    gen_attention_plan_module,
    hopper,
)
from flashinfer.jit.norm import NormConfig, gen_norm_module
from flashinfer.jit.page import gen_page_module
from flashinfer.jit.rope import RopeConfig, gen_rope_module
from flashinfer.jit.sampling import Filter, Output, SamplingConfig, gen_sampling_module
from flashinfer.jit.topk import TopKConfig, TopKOutput, gen_topk_module

from .config import ModelConfig


def modules(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> list[JitSpec]:
    """What `Engine` calls, whatever it is asked for.

    `flashinfer build llama-bf16` makes these, and more, for models with heads of 128 or 64
    elements, all in bfloat16 and without windows.

    Parameters
    ----------
    config : ModelConfig
        Shapes, windows.
    dtype, kv_dtype : torch.dtype
        Types of activations and of the cache.
    """
    f32 = torch.float32
    return [
        *(gen_attention_module(case) for case in _attention(config, dtype, kv_dtype)),
        gen_attention_plan_module(),
        gen_norm_module(NormConfig(dtype, dtype)),
        gen_norm_module(NormConfig(dtype, dtype, add_residual=True)),
        gen_act_and_mul_module("silu", dtype),
        gen_rope_module(RopeConfig(dtype, kv_dtype, False, append=True, keeps_rows=True)),
        gen_page_module(),
        # The chain of sampling.py.
        *(gen_topk_module(TopKConfig(logits, TopKOutput.VALUES)) for logits in (dtype, f32)),
        gen_sampling_module(SamplingConfig(f32, f32, True, Filter.NONE, Output.PROBS)),
        *(
            gen_sampling_module(SamplingConfig(f32, f32, False, filter, output))
            for filter, output in (
                (Filter.TOP_K, Output.PROBS),
                (Filter.TOP_P, Output.PROBS),
                (Filter.NONE, Output.TOKEN),
                (Filter.MIN_P, Output.TOKEN),
            )
        ),
    ]


def _attention(
    config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Iterator[AttentionConfig]:
    """Decoding, and prompts from two tokens on: their lengths choose the tile."""
    group, dim = config.num_heads // config.num_kv_heads, config.head_dim
    prompts = {choose_tile_q(n * group, n * group, dim) for n in range(2, 67)}
    # A short prompt among requests that decode.
    prompts.add(choose_tile_q(2 * group, group, dim))
    cases = [("none", choose_tile_q(group, group, dim)), *(("causal", t) for t in sorted(prompts))]
    for window in sorted({window >= 0 for window in config.windows}):
        for mask, tile in cases:
            yield AttentionConfig(
                dtype, kv_dtype, dtype, dim, dim, tile, mask_mode=mask, sliding_window=window
            )
        if _takes_hopper(dtype, kv_dtype, dim):
            yield AttentionConfig(
                *(dtype, kv_dtype, dtype, dim, dim, hopper.hopper_tile_q(dim, dim, dtype)),
                mask_mode="causal",
                sliding_window=window,
                backend="fa3",
            )


def _takes_hopper(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> bool:
    """Whether long prompts go to the kernel for Hopper."""
    is_target = any(major == 9 for major, _ in current_compilation_context.TARGET_CUDA_ARCHS)
    features = hopper.KernelFeatures(dtype, kv_dtype, head_dim, head_dim)
    missing = hopper.missing_on_hopper(features)
    return is_target and missing is None
