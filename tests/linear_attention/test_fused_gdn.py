"""A whole decode step of a gated delta rule layer, against the layer over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashinfer import gdn_fused_decode_step, gdn_fused_decode_step_supported
from tests.bodies import body_of
from tests.linear_attention.recurrences import gated_delta_rule, relative_error

BF16 = torch.bfloat16
HEADS, V_HEADS, DIM, HIDDEN, WIDTH = 2, 4, 64, 96, 4
CHANNELS = (2 * HEADS + V_HEADS) * DIM


def weights(device: torch.device) -> dict[str, torch.Tensor]:
    shapes = {
        "w_ba": (HIDDEN, 2 * V_HEADS),
        "conv_weight": (CHANNELS, WIDTH),
        "conv_bias": (CHANNELS,),
        "A_log": (V_HEADS,),
        "dt_bias": (V_HEADS,),
    }
    made = {name: torch.randn(shape, device=device) / 2 for name, shape in shapes.items()}
    return {n: x if n in ("A_log", "dt_bias") else x.to(BF16) for n, x in made.items()}


def layer(hidden: torch.Tensor, mixed: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """Outputs of the tokens of one sequence, from nothing: [tokens, v_heads, dim], in float64."""
    w = {name: x.double() for name, x in w.items()}
    padded = F.pad(mixed.double().T, (WIDTH - 1, 0))
    taps = w["conv_weight"][:, None]
    inputs = F.silu(F.conv1d(padded, taps, w["conv_bias"], groups=CHANNELS)).T
    q, k, v = inputs.view(len(mixed), -1, DIM).split([HEADS, HEADS, V_HEADS], 1)
    b, a = (hidden.double() @ w["w_ba"]).split(V_HEADS, 1)
    decay = torch.exp(-w["A_log"].exp() * F.softplus(a + w["dt_bias"]))
    start = q.new_zeros(V_HEADS, DIM, DIM)
    return gated_delta_rule(q, k, v, decay, torch.sigmoid(b), start, 0.3, True)[0]


@pytest.mark.parametrize("function", [gdn_fused_decode_step, body_of], ids=["called", "body"])
@pytest.mark.parametrize("channels_first", [True, False])
def test_tokens_one_by_one(device: torch.device, channels_first: bool, function: Any) -> None:
    torch.manual_seed(0)
    function = body_of(gdn_fused_decode_step) if function is body_of else function
    w = weights(device)
    slots = torch.tensor([0, 3, -1, 1], device=device)
    pool = torch.full((5, CHANNELS, WIDTH - 1), float("nan"), dtype=BF16, device=device)
    if not channels_first:
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    state = torch.full((5, V_HEADS, DIM, DIM), float("nan"), device=device)
    for cache in (pool, state):
        cache[slots[slots >= 0]] = 0.0
    hidden = torch.randn(5, 4, HIDDEN, device=device).to(BF16)
    mixed = torch.randn(5, 4, CHANNELS, device=device).to(BF16)
    for t in range(5):
        out, *pools = function(
            hidden[t], mixed_qkv=mixed[t], **w, conv_state=pool, ssm_state=state,
            state_indices=slots, scale=0.3,
        )  # fmt: skip
        assert pools[0] is pool and pools[1] is state and not out[2].any()
        for row in (0, 1, 3):
            wanted = layer(hidden[: t + 1, row], mixed[: t + 1, row], w)[-1]
            assert relative_error(out[row, 0], wanted) < 2e-2
    for cache in (pool, state):
        assert cache[[2, 4]].isnan().all() and cache[slots[slots >= 0]].isfinite().all()


def test_only_padding_touches_nothing(device: torch.device) -> None:
    w, pool = weights(device), torch.randn(2, CHANNELS, WIDTH - 1, device=device).to(BF16)
    state = torch.randn(2, V_HEADS, DIM, DIM, device=device)
    before = pool.clone(), state.clone()
    out, *_ = body_of(gdn_fused_decode_step)(
        torch.ones(2, HIDDEN, dtype=BF16, device=device), conv_state=pool, ssm_state=state, **w,
        mixed_qkv=torch.ones(2, CHANNELS, dtype=BF16, device=device), scale=None,
        state_indices=torch.tensor([-1, -1], device=device),
    )  # fmt: skip
    assert not out.any() and torch.equal(pool, before[0]) and torch.equal(state, before[1])


@pytest.mark.parametrize("function", [gdn_fused_decode_step, body_of], ids=["called", "body"])
def test_refusals(device: torch.device, function: Any) -> None:
    function = body_of(gdn_fused_decode_step) if function is body_of else function
    call = {
        "hidden_states": torch.zeros(2, HIDDEN, dtype=BF16, device=device),
        "mixed_qkv": torch.zeros(2, CHANNELS, dtype=BF16, device=device),
        **weights(device),
        "conv_state": torch.zeros(3, CHANNELS, WIDTH - 1, dtype=BF16, device=device),
        "ssm_state": torch.zeros(3, V_HEADS, DIM, DIM, device=device),
        "state_indices": torch.tensor([0, 1], device=device),
        "scale": None,
    }
    for name, wrong in {
        "hidden_states": call["hidden_states"][1:],
        "w_ba": call["w_ba"].double(),
        "mixed_qkv": call["mixed_qkv"][:, DIM:],
        "conv_bias": call["conv_bias"][1:],
        "conv_state": call["conv_state"].float(),
        "state_indices": call["state_indices"].float(),
        "scale": "large",
        "out": torch.zeros(2, 1, V_HEADS, DIM, device=device),
    }.items():
        expected = "mixed_qkv|qkv_dim|conv" if name == "mixed_qkv" else f"{name}|batch_size"
        with pytest.raises((TypeError, ValueError), match=expected):
            function(**{**call, name: wrong})
            pytest.fail(f"{name} was accepted")


def test_no_kernel_does_it_all() -> None:
    assert gdn_fused_decode_step_supported(8) is False
