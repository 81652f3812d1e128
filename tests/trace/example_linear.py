"""Calls of ``example.py``: layers with a recurrent state."""

from __future__ import annotations

import itertools

import torch

from flashinfer import gdn2_prefill, gdn_decode, gdn_prefill, mamba
from flashinfer.gdn_kernels import gdn_decode_bf16_state
from flashinfer.kda import recurrent_kda
from flashinfer.kda_decode import (
    fused_kda_decode,
    packed_fused_kda_decode,
    packed_kda_decode,
)


def make_calls(dtype: torch.dtype) -> None:
    """A layer of Qwen3-Next and one of Mamba-2, with few sequences."""

    def new(*shape: int):
        return torch.randn(*shape, dtype=dtype)

    q, v, b = new(2, 3, 16, 128), new(2, 3, 32, 128), new(2, 3, 32)
    state, gate = torch.randn(4, 32, 128, 128), torch.randn(32)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    one = [x[:, :1] for x in (q, q, v)]
    gdn_decode.gated_delta_rule_decode_pretranspose(*one, state[:2], gate, b[:, :1], gate, b[:, :1])
    gdn_decode.gated_delta_rule_decode(*one, state[:2], gate, b[:, :1], gate, b[:, :1])
    gdn_decode.gated_delta_rule_mtp(
        q, q, v, state, slots, gate, b, gate, b, disable_state_update=True
    )
    rings = {
        "replayssm_rawv": new(4, 32, 3, 128), "replayssm_rawk": new(4, 16, 3, 128),
        "replayssm_g": torch.randn(4, 32, 3), "replayssm_beta": torch.randn(4, 32, 3),
    }  # fmt: skip
    gdn_decode.gated_delta_rule_mtp(
        q, q, v, state, slots, gate, b, gate, b, cache_replayssm=True, **rings
    )
    gdn_decode.gated_delta_rule_replayssm_commit(
        state[None], *(ring[None] for ring in rings.values()), slots, slots
    )
    width = 64 * 128
    gdn_decode.gdn_fused_decode_step(
        new(2, 2048), new(2048, 64), new(2, width), new(width, 4), new(width), new(4, width, 3),
        gate, gate, None, state, slots,
    )  # fmt: skip
    gdn_decode_bf16_state.gated_delta_rule_mtp(
        gate, b, gate, q=q, k=q, v=v, b=b, initial_state_source=state.to(dtype),
        initial_state_indices=slots,
    )  # fmt: skip
    tokens, values, bounds = q.flatten(0, 1), v.flatten(0, 1), torch.tensor([0, 4, 6])
    for initial in ({}, {"initial_state": state[:2]}):
        for final in (False, True):
            gdn_prefill.chunk_gated_delta_rule(
                tokens, tokens, values, cu_seqlens=bounds, output_final_state=final, **initial
            )
            gdn_prefill.chunk_gated_delta_product(
                tokens, *(x.repeat(2, 1, 1) for x in (tokens, values)), num_householder=2,
                cu_seqlens=bounds, output_final_state=final, **initial,
            )  # fmt: skip
            gdn2_prefill.chunk_gated_delta_rule2(
                tokens, tokens, values, -torch.rand(6, 32, 128), torch.rand(6, 32, 128),
                torch.rand(6, 32, 128), cu_seqlens=bounds, output_final_state=final, **initial,
            )  # fmt: skip
    call_kda(dtype, state, slots)
    call_mamba(dtype, slots)


def call_mamba(dtype: torch.dtype, slots: torch.Tensor) -> None:
    """A layer of Mamba-2."""

    def new(*shape: int):
        return torch.randn(*shape, dtype=dtype)

    pool, A, D = new(4, 64, 64, 128), -torch.rand(64, 64, 128), torch.ones(64, 64)
    for steps in ((), (3,)):
        x, B = new(2, *steps, 64, 64), new(2, *steps, 8, 128)
        mamba.selective_state_update(pool, x, x, A, B, B, D, state_batch_indices=slots)
    rates, widths = (-torch.rand(64, 1, 1)).expand(64, 64, 128), (64, 8)
    x, B = new(2, 3, 64, 64), new(2, 3, 8, 128)
    rings = [new(4, heads, 6, dim) for heads, dim in zip(widths, (64, 128), strict=True)]
    mamba.checkpointing_ssu(
        pool, *rings, torch.rand(4, 64, 6), slots.new_zeros(4), slots.new_full((4,), 2), x,
        x[..., :1].expand(x.shape), rates, B, B, torch.empty_like(x), D, x,
        state_batch_indices=slots,
    )  # fmt: skip
    x, B, gates = new(2, 5, 64, 64), new(2, 5, 8, 128), torch.randn(64)
    for final in (False, True):
        mamba.ssd_combined_fwd(
            x, x[..., 0].contiguous(), -torch.rand(64), B, B, gates, x, gates, True,
            return_final_states=final,
        )  # fmt: skip


def call_kda(dtype, state, slots) -> None:
    """Layers of Kimi Linear."""

    def new(*shape: int):
        return torch.randn(*shape, dtype=dtype)

    keys, rate, b = new(2, 3, 32, 128), torch.randn(32), new(2, 3, 32)
    pool, starts = torch.randn(2, 32, 128, 128), torch.arange(3)
    kept = {
        "state_checkpoints": pool, "checkpoint_cu_starts": starts, "checkpoint_every_n_tokens": 2,
    }  # fmt: skip
    given = ({"initial_state": state[:2]}, {})
    for initial, final, more in itertools.product(given, (False, True), ({}, kept)):
        rest = {"output_final_state": final, **initial, **more}
        recurrent_kda(keys, keys, keys, -keys.abs(), b, **rest)
        recurrent_kda(
            keys, keys, keys, keys, b, rate, torch.randn(32, 128), use_gate_in_kernel=True,
            lower_bound=-5.0, beta_is_logit=True, **rest,
        )  # fmt: skip
    packed_kda_decode(
        new(2, 3 * 32 * 128), new(2, 32 * 128), b[:, 0], rate, torch.randn(32, 128), state, slots
    )
    heads, width = (12, 128), 12 * 128
    weights = (torch.randn(3, 4, width), rate[:12], torch.randn(width), torch.ones(128))

    def layer(rows: int, length: int):
        """Arguments of a step over `rows` tokens, with a cache of `length` inputs."""
        taps, A_log, bias, norm = weights
        return {
            "x": new(rows, 3 * width), "weight": taps, "conv_state": new(8, 3 * width, length),
            "raw_gate": new(1, rows, *heads), "raw_beta": new(1, rows, 12), "A_log": A_log,
            "dt_bias": bias, "state": torch.randn(8, 12, 128, 128),
            "output_gate": new(rows, *heads), "norm_weight": norm,
        }  # fmt: skip

    fused_kda_decode(**layer(2, 3), state_indices=slots)
    packed_fused_kda_decode(
        **layer(6, 5), state_indices=torch.arange(1, 7, dtype=torch.int32).view(2, 3),
        query_start_loc=starts.int()[:3] * 3, num_accepted_tokens=slots.new_full((2,), 2),
    )  # fmt: skip
