"""Mamba's selective state update against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from flashinfer.mamba import selective_state_update
from tests.linear_attention.recurrences import STORAGE_ERROR, relative_error, selective_state

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCALED = {torch.int16: 32767, torch.int8: 127, torch.float8_e4m3fn: 448}

# batch, tokens, heads, dim, dstate, groups, dtype, state dtype, tied
CASES = [
    (2, 1, 4, 64, 128, 2, BF16, BF16, True),
    (2, 3, 4, 64, 128, 2, BF16, FP32, True),
    (2, 6, 3, 50, 64, 1, FP32, FP32, False),
    (3, 1, 1, 300, 16, 1, BF16, FP32, False),
    (40, 1, 16, 64, 128, 4, BF16, FP16, True),
    (2, 2, 2, 64, 128, 1, BF16, torch.int16, True),
    (2, 2, 2, 40, 128, 1, BF16, torch.int8, True),
    (2, 2, 2, 64, 64, 1, BF16, torch.float8_e4m3fn, False),
    # So many rows that sequences share what a CTA has of A.
    (6, 1, 8, 200, 128, 2, BF16, BF16, False),
    (9, 1, 8, 144, 128, 1, BF16, torch.int8, False),
]


class Problem:
    def __init__(self, case, device, slots):
        batch, tokens, heads, dim, dstate, groups, dtype, state_dtype, tied = case
        self.x, self.z = (
            torch.randn(batch, tokens, heads, dim, dtype=dtype, device=device) for _ in "xz"
        )
        self.B, self.C = (
            torch.randn(batch, tokens, groups, dstate, dtype=dtype, device=device) for _ in "BC"
        )
        if tied:
            self.A = (-torch.rand(heads, device=device))[:, None, None].expand(heads, dim, dstate)
            dt = torch.randn(batch, tokens, heads, device=device)
            self.dt = dt[..., None].expand(batch, tokens, heads, dim)
            self.dt_bias, self.D = (
                torch.randn(heads, device=device)[:, None].expand(heads, dim) for _ in "bD"
            )
        else:
            self.A = -torch.rand(heads, dim, dstate, device=device)
            self.dt = torch.randn(batch, tokens, heads, dim, device=device)
            self.dt_bias, self.D = (torch.randn(heads, dim, device=device) for _ in "bD")
        self.start = torch.randn(slots, heads, dim, dstate, dtype=torch.float64, device=device)
        self.scale = None
        if state_dtype in SCALED:
            self.scale = (self.start.abs().amax(-1) / SCALED[state_dtype]).float()
            codes = self.start / self.scale[..., None]
            codes = codes if state_dtype.is_floating_point else codes.round()
            self.state = codes.to(state_dtype)
        else:
            self.state = self.start.to(state_dtype)
        self.start = self.value(self.state, self.scale)
        self.tolerance = 1.5 * STORAGE_ERROR[dtype]
        self.state_tolerance = STORAGE_ERROR[state_dtype]

    @staticmethod
    def value(state, scale):
        return state.double() if scale is None else state.double() * scale[..., None].double()

    def inputs(self):
        return dict(
            x=self.x, dt=self.dt, A=self.A, B=self.B, C=self.C, D=self.D, z=self.z,
            dt_bias=self.dt_bias, dt_softplus=True,
        )  # fmt: skip

    def expected(self, i, slot, part=slice(None)):
        dt = torch.nn.functional.softplus(self.dt[i, part].double() + self.dt_bias.double())
        return selective_state(
            self.x[i, part], dt, self.A, self.B[i, part], self.C[i, part], self.D, self.z[i, part],
            self.start[slot],
        )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pool_with_padding(device, case):
    torch.manual_seed(0)
    batch, tokens = case[:2]
    problem = Problem(case, device, 2 * batch + 1)
    slots = torch.randperm(2 * batch + 1, device=device)
    read, write = slots[:batch].int(), slots[batch : 2 * batch].int()
    read[0] = -1
    state, scale = problem.state.clone(), problem.scale
    scale = None if scale is None else scale.clone()
    out = torch.full_like(problem.x, float("nan"))
    shape = (batch, tokens, *state.shape[1:])
    buffer = torch.zeros(shape, dtype=state.dtype, device=device)
    buffer_scale = None if scale is None else torch.zeros(shape[:-1], device=device)
    got = selective_state_update(
        state, **problem.inputs(), state_batch_indices=read, dst_state_batch_indices=write,
        state_scale=scale, out=out, intermediate_states_buffer=buffer,
        intermediate_state_scales=buffer_scale, cache_steps=tokens,
    )  # fmt: skip
    assert got is out and not out[0].any()
    values, kept = problem.value(state, scale), problem.value(buffer, buffer_scale)
    touched = []
    for i in range(1, batch):
        outputs, states = problem.expected(i, int(read[i]))
        assert relative_error(out[i], outputs) < problem.tolerance
        assert relative_error(values[write[i].long()], states[-1]) < problem.state_tolerance
        for t, expected in enumerate(states):
            assert relative_error(kept[i, t], expected) < problem.state_tolerance
        touched.append(int(write[i]))
    rest = [slot for slot in range(len(state)) if slot not in touched]
    assert torch.equal(state[rest].float(), problem.state[rest].float())


def test_one_token_without_its_dimension(device):
    torch.manual_seed(1)
    problem = Problem(CASES[0], device, 2)
    state = problem.state.clone()
    several = {"x", "dt", "B", "C", "z"}
    inputs = {k: v[:, 0] if k in several else v for k, v in problem.inputs().items()}
    out = selective_state_update(state, **inputs)
    for i in range(2):
        outputs, states = problem.expected(i, i)
        assert relative_error(out[i], outputs[0]) < problem.tolerance
        assert relative_error(state[i], states[-1]) < problem.state_tolerance


@pytest.mark.parametrize("batch", [3, 40])
@pytest.mark.parametrize(
    ("heads", "dim", "dstate", "groups", "dtype", "state_dtype"),
    [
        (16, 72, 128, 4, BF16, BF16),
        (6, 50, 64, 3, FP32, FP32),
        (4, 64, 256, 1, BF16, FP32),
        (16, 33, 16, 2, BF16, BF16),
    ],
    ids=str,
)
def test_one_token_with_a_time_step_per_channel(
    device, batch, heads, dim, dstate, groups, dtype, state_dtype
):
    torch.manual_seed(4)
    case = (batch, 1, heads, dim, dstate, groups, dtype, state_dtype, True)
    problem = Problem(case, device, 2 * batch + 1)
    problem.dt = torch.randn(batch, 1, heads, dim, device=device)
    problem.dt_bias = torch.randn(heads, dim, device=device)
    slots = torch.randperm(2 * batch + 1, device=device)
    read, write = slots[:batch].int(), slots[batch : 2 * batch].int()
    read[0] = write[-1] = -1
    results = []
    for _ in range(2):
        state, out = problem.state.clone(), torch.full_like(problem.x, float("nan"))
        selective_state_update(
            state, **problem.inputs(), state_batch_indices=read, dst_state_batch_indices=write,
            out=out,
        )  # fmt: skip
        results.append((state, out))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
    assert not out[0].any()
    for i in range(1, batch):
        outputs, states = problem.expected(i, int(read[i]))
        assert relative_error(out[i], outputs) < problem.tolerance
        if write[i] >= 0:
            assert relative_error(state[write[i].long()], states[-1]) < problem.state_tolerance
    rest = [slot for slot in range(len(state)) if slot not in write[1:].tolist()]
    assert torch.equal(state[rest], problem.state[rest])


def test_one_token_of_rows_that_are_no_vectors(device):
    torch.manual_seed(5)
    problem = Problem(CASES[0], device, 2)
    state = problem.state.clone()
    for name in "BC":
        rows = getattr(problem, name)
        wider = torch.zeros(*rows.shape[:-1], rows.shape[-1] + 1, dtype=rows.dtype, device=device)
        wider[..., 1:] = rows
        setattr(problem, name, wider[..., 1:])
    out = selective_state_update(state, **problem.inputs())
    for i in range(2):
        outputs, states = problem.expected(i, i)
        assert relative_error(out[i], outputs) < problem.tolerance
        assert relative_error(state[i], states[-1]) < problem.state_tolerance


def test_packed_sequences_with_a_slot_per_token(device):
    torch.manual_seed(2)
    problem = Problem((1, 9, 4, 64, 128, 2, BF16, FP32, True), device, 20)
    bounds, accepted = [0, 4, 9], torch.tensor([2, 1], dtype=torch.int32, device=device)
    slots = torch.arange(10, device=device, dtype=torch.int32).view(2, 5)
    written = slots + 10
    several = {"x", "dt", "B", "C", "z"}
    inputs = {k: v[0] if k in several else v for k, v in problem.inputs().items()}
    state = problem.state.clone()
    out = selective_state_update(
        state, **inputs, state_batch_indices=slots, dst_state_batch_indices=written,
        num_accepted_tokens=accepted, cu_seqlens=torch.tensor(bounds, device=device),
    )  # fmt: skip
    for i in range(2):
        part = slice(bounds[i], bounds[i + 1])
        outputs, states = problem.expected(0, int(slots[i, accepted[i] - 1]), part)
        assert relative_error(out[part], outputs) < problem.tolerance
        for t, expected in enumerate(states):
            assert relative_error(state[int(written[i, t])], expected) < problem.state_tolerance


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_stochastic_rounding(device, dtype):
    torch.manual_seed(3)
    problem = Problem((2, 1, 8, 64, 128, 1, BF16, dtype, True), device, 2)
    seeds = [torch.tensor([seed], device=device) for seed in range(33)]
    results = []
    for seed in seeds:
        state = problem.state.clone()
        selective_state_update(state, **problem.inputs(), rand_seed=seed)
        results.append(state.double())
    again = problem.state.clone()
    selective_state_update(again, **problem.inputs(), rand_seed=seeds[0])
    assert torch.equal(again.double(), results[0]) and not torch.equal(results[0], results[1])
    exact = torch.stack([problem.expected(i, i)[1][-1] for i in range(2)])
    nearest = relative_error(exact.to(dtype), exact)
    one, mean = relative_error(results[0], exact), relative_error(sum(results) / 33, exact)
    assert one < 2 * nearest and mean < 0.35 * one


def test_refusals(device):
    problem = Problem(CASES[0], device, 2)
    for name, wrong in {
        "x": problem.x.double(),
        "dt": problem.dt[:, :, :, :8],
        "A": problem.A[..., :8],
        "B": problem.B[..., :64],
        "state_scale": torch.ones(2, 4, 64, device=device),
        "algorithm": "another",
        "backend": "cake",
        "num_accepted_tokens": torch.ones(2, dtype=torch.int32, device=device),
    }.items():
        state = problem.state.clone()
        with pytest.raises((TypeError, ValueError), match=name):
            selective_state_update(state, **{**problem.inputs(), name: wrong})
        assert torch.equal(state, problem.state)
