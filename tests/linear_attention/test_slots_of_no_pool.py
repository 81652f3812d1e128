"""Slots that a pool has not are padding, and tokens end where the tensors do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashinfer.gdn_decode import gated_delta_rule_mtp
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from flashinfer.kda import recurrent_kda
from flashinfer.mamba import selective_state_update

BF16 = torch.bfloat16
NONE = (-1, -7, 6, 8, 2**20)
BATCH, HEADS, DIM, SLOTS = 3, 2, 64, 6


class Pool:
    """States amid others that belong to nobody; slots 4, 0 and 3 are those of sequences."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.every = torch.randn(SLOTS + 16, HEADS, DIM, DIM, device=device).to(dtype)
        self.states = self.every[8 : 8 + SLOTS]
        self.before = self.every.clone()

    def check(self, with_slots: torch.Tensor) -> None:
        """Only slots of sequences have changed."""
        known = {8 + int(slot) for slot in with_slots if 0 <= int(slot) < SLOTS}
        for i in range(len(self.every)):
            same = torch.equal(self.every[i], self.before[i])
            assert same == (i not in known), f"slot {i - 8}"


def tokens(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, HEADS, DIM, device=device).to(BF16)


def gates(device: torch.device, *shape: int) -> dict[str, torch.Tensor]:
    a, b = torch.randn(2, *shape, HEADS, device=device)
    log, bias = torch.randn(2, HEADS, device=device)
    return {"A_log": log, "a": a, "dt_bias": bias, "b": b}


def decode(count: int) -> Callable[..., Any]:
    def make(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        q, k, v = (tokens(device, BATCH, count) for _ in "qkv")
        rest = gates(device, BATCH, count)

        def call(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            return gated_delta_rule_mtp(q, k, v, pool, slots, **rest, disable_state_update=False)[0]

        return call

    return make


def kda(count: int) -> Callable[..., Any]:
    def make(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        q, k, v, g = (tokens(device, BATCH, count) for _ in "qkvg")
        beta = torch.rand(BATCH, count, HEADS, device=device)

        def call(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            return recurrent_kda(
                q, k, v, -g.abs(), beta, initial_state=pool, ssm_state_indices=slots
            )[0]

        return call

    return make


def prompt(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    q, k, v = (tokens(device, 40 * BATCH) for _ in "qkv")
    g, beta = torch.rand(2, 40 * BATCH, HEADS, device=device)
    bounds = torch.arange(0, 40 * BATCH + 1, 40, device=device)

    def call(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        out, _ = chunk_gated_delta_rule(
            q, k, v, g, beta, None, pool, True, bounds, True, state_indices=slots
        )
        return out.view(BATCH, 40, HEADS, DIM)

    return call


def mamba(count: int) -> Callable[..., Any]:
    def make(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        rows = (BATCH, count)
        x, B, C = (tokens(device, *rows) for _ in "xBC")
        dt = torch.rand(*rows, HEADS, 1, device=device).expand(*rows, HEADS, DIM)
        A = -torch.rand(HEADS, 1, 1, device=device).expand(HEADS, DIM, DIM)
        D = torch.rand(HEADS, 1, device=device).expand(HEADS, DIM)

        def call(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            return selective_state_update(pool, x, dt, A, B, C, D, state_batch_indices=slots)

        return call

    return make


@pytest.mark.parametrize(
    "make",
    [
        decode(1), decode(3), kda(2), kda(40), pytest.param(prompt, marks=pytest.mark.gpu),
        mamba(1), mamba(3),
    ],
    ids=["decode", "draft", "kda", "kda prompt", "prompt", "mamba", "mamba draft"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("slot", NONE)
def test_a_slot_that_the_pool_has_not(
    device: torch.device, make: Callable[..., Any], dtype: torch.dtype, slot: int
) -> None:
    torch.manual_seed(0)
    call = make(device)
    pool = Pool(device, dtype)
    slots = torch.tensor([4, slot, 3], device=device)
    out = call(pool.states, slots)
    pool.check(slots)
    again = Pool(device, dtype)
    again.every.copy_(pool.before)
    known = torch.tensor([4, 0, 3], device=device)
    expected = call(again.states, known)
    assert not out[1].any()
    assert torch.equal(out[::2], expected[::2])


@pytest.mark.gpu
@pytest.mark.parametrize("length", [2, 40])
def test_bounds_past_the_tokens(device: torch.device, length: int) -> None:
    """The result is that of bounds which end with the tensors."""
    torch.manual_seed(1)
    total = 3 * length
    right = torch.tensor([0, length, total], device=device)
    wrong = torch.tensor([-5, length, total + 100000], device=device)
    q, k, v, g = (tokens(device, 1, total) for _ in "qkvg")
    beta = torch.rand(1, total, HEADS, device=device)

    def packed(bounds: torch.Tensor) -> torch.Tensor:
        return recurrent_kda(q, k, v, -g.abs(), beta, cu_seqlens=bounds)[0]

    def prompts(bounds: torch.Tensor) -> torch.Tensor:
        decays, rates = beta[0], beta[0]
        out = chunk_gated_delta_rule(q[0], k[0], v[0], decays, rates, cu_seqlens=bounds)
        assert isinstance(out, torch.Tensor)
        return out

    def steps(bounds: torch.Tensor) -> torch.Tensor:
        dt = beta[0, :, :, None].expand(total, HEADS, DIM)
        A = -torch.ones(1, 1, 1, device=device).expand(HEADS, DIM, DIM)
        pool = torch.zeros(2, HEADS, DIM, DIM, device=device)
        return selective_state_update(pool, v[0], dt, A, k[0], q[0], None, cu_seqlens=bounds)

    for call in (packed, prompts, steps):
        assert torch.equal(call(wrong), call(right))


@pytest.mark.gpu
def test_states_of_tokens_that_have_no_place(device: torch.device) -> None:
    """Rows that a buffer has not, and checkpoints beyond the last, are not written."""
    torch.manual_seed(2)

    every = torch.zeros(12, 2, HEADS, DIM, DIM, device=device)
    pool = torch.randn(BATCH, HEADS, DIM, DIM, device=device)
    x, B, C = (tokens(device, 7) for _ in "xBC")
    dt = torch.rand(7, HEADS, 1, device=device).expand(7, HEADS, DIM)
    A = -torch.ones(1, 1, 1, device=device).expand(HEADS, DIM, DIM)
    selective_state_update(
        pool, x, dt, A, B, C, None,
        cu_seqlens=torch.tensor([0, 5, 6, 7], device=device),
        intermediate_states_buffer=every[5:7],
        intermediate_state_indices=torch.tensor([1, -1, 2], device=device),
    )  # fmt: skip
    written = every.flatten(1).any(1)
    assert written.tolist() == [i == 6 for i in range(12)]
    kept = torch.zeros(6, HEADS, DIM, DIM, device=device)
    q, k, v, g = (tokens(device, 1, 5) for _ in "qkvg")
    recurrent_kda(
        q, k, v, -g.abs(), torch.rand(1, 5, HEADS, device=device),
        cu_seqlens=torch.tensor([0, 5], device=device),
        state_checkpoints=kept[2:4],
        checkpoint_cu_starts=torch.tensor([0, 5], device=device),
        checkpoint_every_n_tokens=1,
    )  # fmt: skip
    assert kept.flatten(1).any(1).tolist() == [False, False, True, True, False, False]


@pytest.mark.gpu
def test_a_draft_writes_to_slots_that_there_are(device: torch.device) -> None:
    torch.manual_seed(3)
    pool = Pool(device, torch.float32)
    q, k, v = (tokens(device, BATCH, 2) for _ in "qkv")
    gated_delta_rule_mtp(
        q, k, v, pool.states, torch.tensor([4, 0, 3], device=device), **gates(device, BATCH, 2),
        ssm_state_indices=torch.tensor([[1, 6], [-9, 2], [8, 5]], device=device),
    )  # fmt: skip
    pool.check(torch.tensor([1, 2, 5]))
