"""Calls of ``example.py`` from families of few operations."""

from __future__ import annotations

import torch

from flashinfer import mhc, norm
from flashinfer.topk_varlen import top_k_varlen

NUM_TOKENS = 32


def make_calls(dtype: torch.dtype) -> None:
    call_gated_norms(dtype)
    call_modulated_norms(dtype)
    call_hyper_connections(dtype)
    call_top_k(torch.randn(16, 4096))


def call_gated_norms(dtype) -> None:
    branch, residual = torch.randn(NUM_TOKENS, 8192, dtype=dtype), torch.randn(NUM_TOKENS, 8192)
    alpha, beta = torch.rand(2, 8192)
    weight = torch.zeros(8192, dtype=dtype)
    norm.gated_residual_rmsnorm(branch, residual, weight, alpha, beta, 1e-6, 1.0)
    for gate in (alpha, 1.0):
        norm.gated_residual_next_rmsnorm(
            branch, residual, weight, gate, beta, next_gain_center=1.0, post_weight=weight
        )
    heads, gates = torch.randn(2, NUM_TOKENS, 32, 64, dtype=dtype)
    norm.rmsnorm_sigmoid_gate(heads, gates)


def call_hyper_connections(dtype) -> None:
    """DeepSeek-V4: four streams."""
    residual, x = torch.randn(NUM_TOKENS, 4, 4096, dtype=dtype), torch.randn(NUM_TOKENS, 4096)
    dots, squares = torch.randn(2, NUM_TOKENS, 24), torch.rand(2, NUM_TOKENS) * 16384
    weights = (residual, torch.rand(3), torch.randn(24))
    post, comb, _ = mhc.mhc_pre_big_fuse(dots, squares, *weights, 16384, num_splits=2)
    mhc.mhc_pre_big_fuse_with_prenorm(dots[0], *weights)
    mhc.mhc_post(x.to(dtype), residual, post, comb)


def call_modulated_norms(dtype) -> None:
    """Wan 2.2 5B."""
    x, residual = torch.randn(2, 1, NUM_TOKENS, 3072, dtype=dtype)
    gate, scale, shift = torch.randn(1, NUM_TOKENS, 6 * 3072, dtype=dtype).chunk(6, dim=2)[:3]
    gamma, beta = torch.rand(2, 3072)
    norm.fused_dit_gate_residual_layernorm_gamma_beta(
        x, residual, gate, gamma, beta, gate_bias=beta
    )
    biases = {"scale_bias": gamma, "shift_bias": beta}
    norm.fused_dit_gate_residual_layernorm_scale_shift(
        x, residual, gate, scale, shift, gate_bias=beta, **biases
    )
    norm.fused_dit_residual_layernorm_scale_shift(x, scale, shift, residual=residual, **biases)


def call_top_k(logits) -> None:
    """Two tokens of each request at once, one logit for four tokens of keys."""
    lengths = torch.full((8,), 16000, dtype=torch.int32)
    for return_values in (False, True):
        top_k_varlen(logits, lengths, 512, compress_ratio=4, next_n=2, return_values=return_values)
