"""Drafts whose inputs are kept: verified, then replayed as far as they count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashinfer._linear_attention import replay
from flashinfer.gdn_decode import gated_delta_rule_mtp, gated_delta_rule_replayssm_commit
from tests.bodies import body_of
from tests.linear_attention.recurrences import gated_delta_rule, relative_error

BF16 = torch.bfloat16
LAYERS, SLOTS, HEADS, V_HEADS, DIM_K, DIM_V, TOKENS = 3, 6, 2, 4, 64, 40, 4


def run_on_the_cpu(out, q, k, v, gates, states, *, scale, normalize_qk) -> None:
    """The kernel's results: a state after every token."""
    assert states.write_every_token and states.initial is states.final
    before = states.initial.clone()
    for i, slot in enumerate(states.read_slots.tolist()):
        decay = gates.gate[i].double().exp()
        _, kept = gated_delta_rule(
            q[i], k[i], v[i], decay, gates.beta[i], before[slot], scale, normalize_qk
        )
        for state, target in zip(kept, states.write_slots[i].tolist(), strict=True):
            if target >= 0:
                states.final[target] = state.to(states.final.dtype)


@pytest.fixture(params=["called", "body"])
def commit(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """On a GPU the function, otherwise its reference, and its body with an emulated kernel."""
    if request.param == "called":
        return gated_delta_rule_replayssm_commit
    if device.type == "cuda":
        pytest.skip("the call runs the body there")
    monkeypatch.setattr(replay, "run_delta_rule", run_on_the_cpu)
    return body_of(gated_delta_rule_replayssm_commit)


def new(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device)


def windows(device: torch.device) -> dict[str, torch.Tensor]:
    """Windows of all layers; unwritten places hold NaN."""
    shapes = {
        "rawv": (V_HEADS, TOKENS + 1, DIM_V),
        "rawk": (HEADS, TOKENS + 1, DIM_K),
        "g": (V_HEADS, TOKENS + 1),
        "beta": (V_HEADS, TOKENS + 1),
    }
    return {
        name: torch.full((LAYERS, SLOTS, *shape), float("nan"), device=device).to(
            BF16 if name.startswith("raw") else torch.float32
        )
        for name, shape in shapes.items()
    }


def test_a_draft_is_verified_and_committed(device: torch.device, commit: Any) -> None:
    """States are those after the tokens that count, as if these alone had been decoded."""
    torch.manual_seed(0)
    slots = torch.tensor([4, 1, -1, 0], dtype=torch.int32, device=device)
    accepted = torch.tensor([2, 4, 3, 0], dtype=torch.int32, device=device)
    tracked = torch.tensor([5, 3, 2, 2], dtype=torch.int32, device=device)
    steps = torch.tensor([0, -1, 1, 2], dtype=torch.int32, device=device)
    pool, kept = new(device, LAYERS, SLOTS, V_HEADS, DIM_V, DIM_K), windows(device)
    expected = pool.double().clone()
    for layer in range(LAYERS):
        q, k = (new(device, 4, TOKENS, HEADS, DIM_K).to(BF16) for _ in "qk")
        v = new(device, 4, TOKENS, V_HEADS, DIM_V).to(BF16)
        a, b = (new(device, 4, TOKENS, V_HEADS).to(BF16) for _ in "ab")
        A_log, bias = new(device, V_HEADS), new(device, V_HEADS)
        before = pool[layer].clone()
        call = (q, k, v, pool[layer], slots, A_log, a, bias, b)
        rings = {f"replayssm_{name}": window[layer] for name, window in kept.items()}
        out, state = gated_delta_rule_mtp(*call, cache_replayssm=True, **rings)
        plain, _ = gated_delta_rule_mtp(*call)
        assert torch.equal(out, plain) and torch.equal(state, before)
        decay = torch.exp(-A_log.double().exp() * F.softplus(a.double() + bias.double()))
        for i in (0, 1, 3):
            inputs = (q[i], k[i], v[i], decay[i], torch.sigmoid(b[i].double()))
            _, states = gated_delta_rule(*inputs, before[slots[i]], 1.0, True)
            if steps[i] >= 0:
                expected[layer, tracked[i]] = states[steps[i]]
            if accepted[i] > 0:
                expected[layer, slots[i]] = states[accepted[i] - 1]
    unused = [window[:, [2, 3, 5]] for window in kept.values()]
    assert all(part.isnan().all() for part in unused)
    commit(
        pool, *(kept[name] for name in ("rawv", "rawk", "g", "beta")), slots, accepted,
        track_state_indices=tracked, track_steps=steps,
    )  # fmt: skip
    assert relative_error(pool, expected) < 1e-5
    assert all(torch.equal(pool[:, i].double(), expected[:, i]) for i in (0, 3))


def test_the_null_slot_is_padding(device: torch.device, commit: Any) -> None:
    torch.manual_seed(1)
    pool = new(device, LAYERS, SLOTS, V_HEADS, DIM_V, DIM_K)
    before, kept = pool.clone(), {n: torch.zeros_like(w) for n, w in windows(device).items()}
    slots = torch.tensor([0, 2], dtype=torch.int64, device=device)
    kept["beta"] += 0.5
    kept["g"] -= 0.5
    commit(pool, *kept.values(), slots, slots.new_full((2,), 5), null_block_id=0)
    assert torch.equal(pool[:, [0, 1, 3]], before[:, [0, 1, 3]])
    decayed = before[:, 2].double() * torch.exp(torch.tensor(-0.5 * 5, dtype=torch.float64))
    assert relative_error(pool[:, 2], decayed) < 1e-5


def test_refusals(device: torch.device, commit: Any) -> None:
    kept = {f"{n}_cache": torch.zeros_like(w) for n, w in windows(device).items()}
    pool = torch.zeros(LAYERS, SLOTS, V_HEADS, DIM_V, DIM_K, device=device)
    slots = torch.tensor([0, 2], dtype=torch.int32, device=device)
    call = {"checkpoint_state": pool, **kept, "state_indices": slots, "accept_lens": slots}
    for name, wrong in {
        "checkpoint_state": pool[..., 1:],
        "rawv_cache": kept["rawv_cache"].double(),
        "rawk_cache": kept["rawk_cache"][:, 1:],
        "g_cache": kept["g_cache"].to(BF16),
        "beta_cache": kept["beta_cache"][..., 1:],
        "state_indices": slots.float(),
        "accept_lens": slots[1:],
        "backend": "tcgen05",
    }.items():
        expected = "checkpoint_state|rawk_cache" if name == "checkpoint_state" else name
        with pytest.raises((TypeError, ValueError), match=expected):
            commit(**{**call, name: wrong})
            pytest.fail(f"{name} was accepted")


def test_windows_and_flag_belong_together(device: torch.device) -> None:
    q = torch.zeros(1, TOKENS, HEADS, DIM_K, dtype=BF16, device=device)
    v = torch.zeros(1, TOKENS, V_HEADS, DIM_V, dtype=BF16, device=device)
    gate, rate = v[..., 0], torch.zeros(V_HEADS, device=device)
    pool = torch.zeros(SLOTS, V_HEADS, DIM_V, DIM_K, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    call = (q, q, v, pool, slots, rate, gate, rate, gate)
    rings = {f"replayssm_{name}": window[0] for name, window in windows(device).items()}
    for function in (gated_delta_rule_mtp, body_of(gated_delta_rule_mtp)):
        for changes in (
            {**rings, "cache_replayssm": False},
            {"cache_replayssm": True},
            {**rings, "cache_replayssm": True, "replayssm_g": rings["replayssm_g"].to(BF16)},
            {**rings, "cache_replayssm": True, "replayssm_rawk": rings["replayssm_rawk"][1:]},
            {**rings, "cache_replayssm": True, "disable_state_update": False},
            {**{n: w[:, :, :2] for n, w in rings.items()}, "cache_replayssm": True},
        ):
            with pytest.raises((TypeError, ValueError), match="replayssm|disable_state|num_kept"):
                function(*call, **changes)
                pytest.fail(f"{list(changes)} was accepted")
