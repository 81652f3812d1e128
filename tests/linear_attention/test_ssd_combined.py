"""Mamba-2 over whole sequences against the recurrence in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from flashinfer.mamba.ssd_combined import ssd_combined_fwd
from tests.linear_attention.recurrences import relative_error, selective_state

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 7e-3, torch.float16: 1.5e-3}

# lengths, heads, groups, headdim, dstate, dtype, dtype of dt, dtype of the states, gated
CASES = [
    ([100, 64, 0, 7, 150], 4, 2, 64, 128, torch.bfloat16, torch.bfloat16, torch.float32, True),
    ([300], 8, 1, 64, 128, torch.bfloat16, torch.float32, torch.bfloat16, False),
    ([129, 65], 2, 2, 128, 64, torch.float16, torch.float16, torch.float32, True),
    ([70] * 70, 2, 1, 128, 128, torch.bfloat16, torch.bfloat16, torch.float32, False),
]


class Problem:
    """Random packed sequences, and what the recurrence makes of them."""

    def __init__(self, case, device):
        lengths, heads, groups, dim, dstate, dtype, dt_dtype, state_dtype, gated = case
        total = sum(lengths)
        self.bounds = [0, *itertools.accumulate(lengths)]
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        self.seq_idx = numbers[None].int().to(device)
        self.x = torch.randn(1, total, heads, dim, device=device).to(dtype)
        self.dt = torch.randn(1, total, heads, device=device).to(dt_dtype)
        self.A = -torch.rand(heads, device=device) - 0.01
        self.B, self.C = (
            torch.randn(1, total, groups, dstate, device=device).to(dtype) for _ in "BC"
        )
        self.D, self.dt_bias = torch.randn(heads, device=device), torch.randn(heads, device=device)
        self.z = torch.randn_like(self.x) if gated else None
        self.initial = torch.randn(len(lengths), heads, dim, dstate, device=device).to(state_dtype)
        self.limits = (0.01, 2.0)
        self.tolerance = TOLERANCE[dtype]

    def call(self, **changes):
        arguments = dict(
            x=self.x, dt=self.dt, A=self.A, B=self.B, C=self.C, D=self.D, z=self.z,
            dt_bias=self.dt_bias, dt_softplus=True, dt_limit=self.limits,
            initial_states=self.initial, seq_idx=self.seq_idx,
        )  # fmt: skip
        return ssd_combined_fwd(**{**arguments, **changes})

    def expected(self, part, state):
        dt = F.softplus(self.dt[0, part].double() + self.dt_bias.double()).clamp(*self.limits)
        dt = dt[..., None].expand_as(self.x[0, part])
        z = None if self.z is None else self.z[0, part]
        return selective_state(
            self.x[0, part], dt, self.A[:, None, None], self.B[0, part], self.C[0, part],
            self.D[:, None], z, state,
        )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_recurrence(device, case):
    torch.manual_seed(0)
    problem = Problem(case, device)
    out = torch.full_like(problem.x, float("nan"))
    returned, final = problem.call(out=out)
    assert returned is out and final.dtype == problem.initial.dtype
    for i, (first, last) in enumerate(itertools.pairwise(problem.bounds)):
        if first == last:
            assert torch.equal(final[i], problem.initial[i])
            continue
        outputs, states = problem.expected(slice(first, last), problem.initial[i])
        assert relative_error(out[0, first:last], outputs) < problem.tolerance
        assert relative_error(final[i], states[-1]) < problem.tolerance
    again, state = problem.call()
    assert torch.equal(again, out) and torch.equal(state, final)


def test_state_carried_over_a_split_at_every_position(device):
    torch.manual_seed(1)
    case = ([130], 2, 1, 64, 128, torch.bfloat16, torch.float32, torch.float32, True)
    problem = Problem(case, device)
    outputs, states = problem.expected(slice(0, 130), problem.initial[0])
    for split in (1, 2, 31, 63, 64, 65, 128, 129):
        state, parts = problem.initial, []
        for part in (slice(0, split), slice(split, 130)):
            rows = {name: getattr(problem, name)[:, part] for name in ("x", "dt", "B", "C", "z")}
            out, state = problem.call(**rows, initial_states=state, seq_idx=None)
            parts.append(out)
        assert relative_error(torch.cat(parts, 1)[0], outputs) < problem.tolerance
        assert relative_error(state[0], states[-1]) < problem.tolerance


def test_rows_of_a_batch_without_options(device):
    torch.manual_seed(2)
    case = ([80] * 3, 4, 2, 64, 128, torch.bfloat16, torch.float32, torch.float32, False)
    problem = Problem(case, device)
    rows = {
        name: getattr(problem, name).view(3, 80, *getattr(problem, name).shape[2:])
        for name in ("x", "dt", "B", "C")
    }
    rows["dt"] = rows["dt"].abs()
    out, final = ssd_combined_fwd(A=problem.A, **rows)
    for i in range(3):
        dt = rows["dt"][i][..., None].expand_as(rows["x"][i])
        outputs, states = selective_state(
            rows["x"][i], dt, problem.A[:, None, None], rows["B"][i], rows["C"][i], None, None,
            torch.zeros_like(final[i]),
        )  # fmt: skip
        assert relative_error(out[i], outputs) < problem.tolerance
        assert relative_error(final[i], states[-1]) < problem.tolerance


def test_refusals(device):
    problem = Problem(CASES[0], device)
    for name, wrong in {
        "x": problem.x.float(),
        "dt": problem.dt[..., :1],
        "A": problem.A.double(),
        "B": problem.B[..., :32],
        "C": problem.C.float(),
        "D": problem.D[:1],
        "z": problem.z[..., :32],
        "dt_limit": (2.0, 1.0),
        "seq_idx": problem.seq_idx.float(),
        "initial_states": problem.initial[:, :2],
        "checkpoint_states": problem.initial,
    }.items():
        with pytest.raises((TypeError, ValueError), match=name):
            problem.call(**{name: wrong})
