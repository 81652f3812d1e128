"""Layers of transformers with random weights, a prompt and 32 steps, on our kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from flashinfer.mamba import selective_state_update, ssd_combined_fwd
from tests.linear_attention.recurrences import relative_error

pytestmark = pytest.mark.gpu

PROMPT, STEPS, BATCH = 150, 32, 2


def modeling(model: str) -> Any:
    """Imported when a test runs: every collection would pay the seconds that the import takes."""
    return pytest.importorskip(f"transformers.models.{model}.modeling_{model}")


def chunks(query, key, value, g, beta, initial_state=None, **options):
    """`torch_chunk_gated_delta_rule` of transformers: its states have the key's axis first."""
    batch, tokens = query.shape[:2]
    rows = [x.flatten(0, 1).bfloat16().contiguous() for x in (query, key, value)]
    bounds = torch.arange(batch + 1, device=query.device) * tokens
    state = None if initial_state is None else initial_state.transpose(-1, -2).contiguous()
    out, final = chunk_gated_delta_rule(
        *rows, g.flatten(0, 1).float().exp(), beta.flatten(0, 1).float(), initial_state=state,
        output_final_state=True, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out.view(batch, tokens, *out.shape[1:]).float(), final.transpose(-1, -2).contiguous()


def steps(query, key, value, g, beta, initial_state, **options):
    """`torch_recurrent_gated_delta_rule`: gates as the inputs that give these decays and rates."""
    heads = value.shape[2]
    zeros = torch.zeros(heads, device=query.device)
    rows = [x.bfloat16().contiguous() for x in (query, key, value)]
    a, b = (-g).expm1().log(), torch.logit(beta.float())
    state = initial_state.transpose(-1, -2).contiguous()
    out, state = gated_delta_rule_decode_pretranspose(*rows, state, zeros, a, zeros, b)
    return out.float(), state.transpose(-1, -2).contiguous()


def mamba_chunks(x, dt, A, B, C, *, D, dt_bias, dt_limit, initial_states, **options):
    """`mamba2_chunk_scan` of transformers."""
    x, B, C = (tensor.bfloat16().contiguous() for tensor in (x, B, C))
    out, final = ssd_combined_fwd(
        x, dt.float(), A.float(), B, C, D.float(), dt_bias=dt_bias.float(), dt_softplus=True,
        dt_limit=tuple(dt_limit), initial_states=initial_states,
    )  # fmt: skip
    return out.float(), final


def mamba_steps(state, x, dt, A, B, C, D, *, dt_bias, **options):
    """`mamba2_selective_state_update` of transformers."""
    x, B, C = (tensor.bfloat16().contiguous() for tensor in (x, B, C))
    out = selective_state_update(state, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True)
    return out.float()


def run(layer, hidden, config):
    """Outputs of the prompt and of each step."""
    cache = modeling("qwen3_next").DynamicCache(config=config)
    parts = [slice(0, PROMPT), *(slice(i, i + 1) for i in range(PROMPT, PROMPT + STEPS))]
    with torch.no_grad():
        return torch.cat([layer(hidden[:, part], cache_params=cache) for part in parts], dim=1)


def check(layer, config, device, monkeypatch, functions):
    """Ours in place of `functions` of transformers gives what these give, in float32 on the CPU."""
    hidden = torch.randn(BATCH, PROMPT + STEPS, config.hidden_size)
    expected = run(layer.eval(), hidden, config)
    for (module, name), ours in functions.items():
        monkeypatch.setattr(module, name, ours)
    got = run(copy.deepcopy(layer).to(device), hidden.to(device), config).cpu()
    assert relative_error(got[:, :PROMPT], expected[:, :PROMPT]) < 1e-2
    assert relative_error(got[:, PROMPT:], expected[:, PROMPT:]) < 1e-2


def test_layer_of_qwen3_next(device, monkeypatch):
    qwen3_next = modeling("qwen3_next")
    torch.manual_seed(0)
    config = qwen3_next.Qwen3NextConfig(
        hidden_size=256, num_hidden_layers=1, layer_types=["linear_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4,
    )  # fmt: skip
    layer = qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    functions = {
        (qwen3_next, "torch_chunk_gated_delta_rule"): chunks,
        (qwen3_next, "torch_recurrent_gated_delta_rule"): steps,
    }
    check(layer, config, device, monkeypatch, functions)


def test_layer_of_mamba2(device, monkeypatch):
    mamba2 = modeling("mamba2")
    torch.manual_seed(1)
    config = mamba2.Mamba2Config(
        hidden_size=256, num_heads=8, head_dim=64, expand=2, state_size=128, n_groups=2,
        num_hidden_layers=1, chunk_size=64,
    )  # fmt: skip
    layer = mamba2.Mamba2Mixer(config, 0)
    functions = {
        (mamba2, "mamba2_chunk_scan"): mamba_chunks,
        (mamba2, "mamba2_selective_state_update"): mamba_steps,
    }
    check(layer, config, device, monkeypatch, functions)
