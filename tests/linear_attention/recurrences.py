"""The recurrences of linear attention in float64, token by token, from the papers' formulas."""

from __future__ import annotations

import torch


def gated_delta_rule(q, k, v, decay, beta, state, scale, normalize):
    """Outputs and states of one sequence: S = decay S; S += beta (v - S k) k^T; o = scale S q."""
    q, k, v, decay, beta, state = (x.double() for x in (q, k, v, decay, beta, state))
    if normalize:
        q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6)
        k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    heads = state.shape[0]
    q, k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k, v))
    if decay.ndim == 2:
        decay = decay[..., None]
    outputs, states = [], []
    for t in range(q.shape[0]):
        state = state * decay[t, :, None, :]
        error = v[t] - (state @ k[t, :, :, None])[..., 0]
        state = state + (beta[t, :, None] * error)[..., None] * k[t, :, None, :]
        outputs.append(scale * (state @ q[t, :, :, None])[..., 0])
        states.append(state)
    return torch.stack(outputs), states


def selective_state(x, dt, A, B, C, D, z, state):
    """Outputs and states of one sequence; `dt` as it enters the recurrence."""
    x, dt, A, B, C, state = (t.double() for t in (x, dt, A, B, C, state))
    heads = state.shape[0]
    B, C = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (B, C))
    outputs, states = [], []
    for t in range(x.shape[0]):
        state = state * torch.exp(A * dt[t, ..., None])
        state = state + (dt[t] * x[t])[..., None] * B[t, :, None, :]
        y = (state @ C[t, :, :, None])[..., 0]
        if D is not None:
            y = y + D.double() * x[t]
        if z is not None:
            y = y * torch.nn.functional.silu(z[t].double())
        outputs.append(y)
        states.append(state)
    return torch.stack(outputs), states


def relative_error(actual, expected):
    """Norm of the difference over the norm of what is expected."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


STORAGE_ERROR = {
    torch.float32: 2e-6,
    torch.bfloat16: 2.5e-3,
    torch.float16: 3e-4,
    torch.int16: 1e-4,
    torch.int8: 1.2e-2,
    torch.float8_e4m3fn: 4e-2,
}
"""Relative error of values rounded once to a dtype (the scaled ones: with a scale per row)."""
