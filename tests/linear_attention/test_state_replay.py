"""Mamba-2 with rings of replayed tokens: accepted and refused drafts, and states of a ring."""

from __future__ import annotations

import pytest
import torch

from flashinfer.mamba import (
    allocate_checkpointing_ssu_scratch,
    checkpointing_ssu,
    replayssm_materialize,
    selective_state_update,
)
from tests.linear_attention.recurrences import STORAGE_ERROR, relative_error

BF16, FP32 = torch.bfloat16, torch.float32


class Sequences:
    """Slots with rings, and a pool that takes every accepted token at once."""

    def __init__(self, device, state_dtype, tokens, window, packed):
        torch.manual_seed(0)
        self.batch, self.heads, self.dim, self.dstate, self.groups = 3, 4, 64, 128, 2
        self.device, self.tokens, self.window, self.packed = device, tokens, window, packed
        self.rows, shape = window + tokens, (6, self.heads, self.dim, self.dstate)
        self.exact = torch.randn(*shape, device=device).to(state_dtype).float()
        self.state = self.exact.to(state_dtype, copy=True)
        self.x_cache = torch.zeros(6, self.heads, self.rows, self.dim, dtype=BF16, device=device)
        self.B_cache = torch.zeros(
            6, self.groups, self.rows, self.dstate, dtype=BF16, device=device
        )
        self.dt_cache = torch.zeros(6, self.heads, self.rows, device=device)
        self.start = torch.full((6,), self.rows - 1, dtype=torch.int32, device=device)
        self.count = torch.zeros(6, dtype=torch.int32, device=device)
        self.slots = torch.tensor([4, 0, 5], dtype=torch.int32, device=device)
        self.A = (-torch.rand(self.heads, device=device))[:, None, None].expand(shape[1:])
        self.D = torch.randn(self.heads, self.dim, device=device)
        self.bias = torch.randn(self.heads, device=device)[:, None].expand(self.heads, self.dim)

    def draft(self):
        shape = (self.batch, self.tokens)
        x, z = (
            torch.randn(*shape, self.heads, self.dim, dtype=BF16, device=self.device) for _ in "xz"
        )
        B, C = (
            torch.randn(*shape, self.groups, self.dstate, dtype=BF16, device=self.device)
            for _ in "BC"
        )
        dt = torch.randn(*shape, self.heads, 1, device=self.device)
        return dict(x=x, dt=dt.expand(*shape, self.heads, self.dim), B=B, C=C, z=z)

    def weights(self):
        return dict(A=self.A, D=self.D, dt_bias=self.bias, dt_softplus=True)

    def step(self, draft, **options):
        inputs = dict(draft)
        if self.packed:
            inputs = {name: t.flatten(0, 1)[None] for name, t in draft.items()}
            bounds = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device)
            options |= {"cu_seqlens": bounds * self.tokens, "max_seqlen": self.tokens}
        out = torch.full_like(inputs["x"], float("nan"))
        got = checkpointing_ssu(
            self.state, self.x_cache, self.B_cache, self.dt_cache, self.start, self.count,
            out=out, state_batch_indices=self.slots, **inputs, **self.weights(), **options,
        )  # fmt: skip
        assert got is out
        return out.view(draft["x"].shape)

    def accept(self, draft, accepted):
        """Take the first tokens of each draft: on the exact states, and in the rings' counts."""
        for i, number in enumerate(accepted):
            slot = int(self.slots[i])
            if int(self.count[slot]) + self.tokens > self.window:
                self.start[slot] = (self.start[slot] + self.count[slot]) % self.rows
                self.count[slot] = 0
            self.count[slot] += number
            if number:
                part = {name: t[i : i + 1, :number] for name, t in draft.items()}
                selective_state_update(
                    self.exact, **part, **self.weights(), state_batch_indices=self.slots[i : i + 1]
                )


@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "window", "packed"),
    [(1, 4, False), (4, 6, False), pytest.param(4, 6, True, marks=pytest.mark.gpu)],
)
def test_steps_with_drafts(device, state_dtype, tokens, window, packed):
    case = Sequences(device, state_dtype, tokens, window, packed)
    for step in range(7):
        draft = case.draft()
        expected = selective_state_update(
            case.exact, **draft, **case.weights(), state_batch_indices=case.slots,
            disable_state_update=True,
        )  # fmt: skip
        out = case.step(draft)
        bound = 1.5 * STORAGE_ERROR[BF16] + step * STORAGE_ERROR[state_dtype]
        assert relative_error(out, expected) < bound
        case.accept(draft, [(step + i) % (tokens + 1) for i in range(case.batch)])


def test_padding_leaves_everything(device):
    case = Sequences(device, BF16, 2, 4, False)
    case.count += 3
    case.slots[1] = -1
    before = [t.clone() for t in (case.state[0], case.x_cache[0], case.dt_cache[0])]
    out = case.step(case.draft())
    assert not out[1].any() and out[0].isfinite().all()
    for old, new in zip(before, (case.state[0], case.x_cache[0], case.dt_cache[0]), strict=True):
        assert torch.equal(old, new)


@pytest.mark.gpu
def test_scratch_changes_nothing(device):
    results = []
    for scratch in (False, True):
        case = Sequences(device, FP32, 2, 4, False)
        options = {}
        if scratch:
            made = allocate_checkpointing_ssu_scratch(3, 4, 2, 4, BF16, device)
            options = dict(zip(("cb_scaled", "cumAdt_vec", "cb_old"), made, strict=True))
        results.append(case.step(case.draft(), algorithm="auto", **options))
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [FP32, BF16, torch.int8], ids=str)
def test_states_of_a_ring(device, state_dtype):
    case = Sequences(device, FP32, 4, 6, False)
    draft = case.draft()
    case.step(draft)
    case.count += 4
    scale = torch.rand(6, 4, 64, device=device) * 0.02 + 0.01
    codes = torch.randint(-127, 128, case.state.shape, device=device)
    state = codes.to(torch.int8) if state_dtype == torch.int8 else case.state.to(state_dtype)
    value = state.float() * scale[..., None] if state_dtype == torch.int8 else state.float().clone()

    def table(tensor):
        return torch.tensor([tensor.data_ptr()], device=device)

    def stride(tensor):
        return torch.tensor([tensor.stride(0)], device=device)

    rates = case.A[:, 0, 0].contiguous()
    tensors = (state, case.x_cache, case.B_cache, case.dt_cache)
    source = case.slots[None]
    target = torch.tensor([[1, 2, -1]], dtype=torch.int32, device=device)
    used = torch.tensor([3, 0, 2], dtype=torch.int32, device=device)
    kept = state.clone()
    replayssm_materialize(
        *[make(t) for t in tensors for make in (table, stride)], table(rates), table(scale),
        stride(scale), source, target, case.start[case.slots.long()], used,
        torch.tensor([1, 0, 2], dtype=torch.int32, device=device),
        state_dtype=state_dtype, input_dtype=BF16, matrixA_dtype=FP32, dim=64, dstate=128,
        num_heads=4, heads_per_group=2, max_window=6, ring_buffer_len=case.rows,
    )  # fmt: skip
    part = {name: t[:1, :3] for name, t in draft.items()}
    selective_state_update(value, **part, **case.weights(), state_batch_indices=case.slots[:1])
    got = state.float() * scale[..., None] if state_dtype == torch.int8 else state.float()
    assert relative_error(got[1], value[int(case.slots[0])]) < 2 * STORAGE_ERROR[state_dtype]
    assert torch.equal(state[2], kept[int(case.slots[1])])
    assert torch.equal(state[[0, 3, 4, 5]], kept[[0, 3, 4, 5]])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("x_cache", lambda case: case.x_cache[:, :, :3]),
        ("cu_seqlens", lambda case: torch.zeros(4, dtype=torch.int32, device=case.device)),
        ("algorithm", lambda case: "another"),
    ],
)
def test_refusals(device, name, wrong):
    case = Sequences(device, FP32, 2, 4, False)
    if name == "x_cache":
        case.x_cache = wrong(case)
        options = {}
    else:
        options = {name: wrong(case)}
    with pytest.raises((TypeError, ValueError), match=name):
        case.step(case.draft(), **options)
