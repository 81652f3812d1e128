"""Kimi Delta Attention against the recurrence in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from flashinfer.kda import recurrent_kda
from tests.linear_attention.recurrences import STORAGE_ERROR, gated_delta_rule, relative_error

# lengths, heads, v_heads, head_dim_k, head_dim_v, dtype, state dtype, lower bound (None: softplus)
CASES = [
    ([1] * 5, 2, 4, 128, 128, torch.bfloat16, torch.float32, -5.0),
    ([4] * 3, 2, 2, 128, 128, torch.bfloat16, torch.bfloat16, None),
    ([9, 0, 70, 1], 1, 3, 64, 40, torch.float16, torch.float32, -2.0),
    ([3, 5], 2, 2, 32, 24, torch.bfloat16, torch.float16, None),
]


# The message may name another argument.
MATCHES = {"state_checkpoints": "checkpoint_cu_starts", "num_accepted_tokens": "num_"}


class Problem:
    """Random inputs in packed form, and what the recurrence makes of them."""

    def __init__(self, case, device, slots=None):
        lengths, heads, v_heads, dim_k, dim_v, dtype, state_dtype, self.bound = case
        total = sum(lengths)
        self.bounds = [0, *itertools.accumulate(lengths)]
        self.cu_seqlens = torch.tensor(self.bounds, device=device)
        self.q, self.k = (
            torch.randn(1, total, heads, dim_k, device=device).to(dtype) for _ in "qk"
        )
        self.v = torch.randn(1, total, v_heads, dim_v, device=device).to(dtype)
        self.g = torch.randn(1, total, v_heads, dim_k, device=device).to(dtype)
        self.beta = torch.randn(1, total, v_heads, device=device).to(dtype)
        self.A_log = torch.randn(v_heads, device=device)
        self.dt_bias = torch.randn(v_heads, dim_k, device=device)
        count = len(lengths) if slots is None else slots
        self.state = torch.randn(count, v_heads, dim_v, dim_k, device=device).to(state_dtype)
        self.tolerance, self.state_tolerance = (
            1.5 * STORAGE_ERROR[dtype],
            STORAGE_ERROR[state_dtype],
        )

    def call(self, **changes):
        arguments = dict(
            q=self.q, k=self.k, v=self.v, g=self.g, beta=self.beta, A_log=self.A_log,
            dt_bias=self.dt_bias, lower_bound=self.bound, use_gate_in_kernel=True,
            beta_is_logit=True, cu_seqlens=self.cu_seqlens,
        )  # fmt: skip
        return recurrent_kda(**{**arguments, **changes})

    def decay(self):
        rate, shifted = self.A_log.double().exp()[:, None], self.g.double() + self.dt_bias.double()
        if self.bound is None:
            return torch.exp(-rate * F.softplus(shifted))
        return torch.exp(self.bound * torch.sigmoid(rate * shifted))

    def expected(self, i, state):
        """Outputs and states of sequence i from `state`."""
        part = slice(self.bounds[i], self.bounds[i + 1])
        if part.start == part.stop:
            return self.v[0, part].double(), [state.double()]
        beta = torch.sigmoid(self.beta.double())
        inputs = (x[0, part] for x in (self.q, self.k, self.v, self.decay(), beta))
        return gated_delta_rule(*inputs, state, self.q.shape[-1] ** -0.5, True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_sequences(device, case):
    torch.manual_seed(0)
    problem = Problem(case, device)
    state, out = problem.state.clone(), torch.full_like(problem.v, float("nan"))
    returned = problem.call(initial_state=state, output=out, output_final_state=True)
    assert returned[0] is out and returned[1] is state
    for i in range(len(case[0])):
        outputs, states = problem.expected(i, problem.state[i])
        part = out[0, problem.bounds[i] : problem.bounds[i + 1]]
        assert relative_error(part, outputs) < problem.tolerance
        assert relative_error(state[i], states[-1]) < problem.state_tolerance
    again = problem.state.clone()
    repeated, nothing = problem.call(initial_state=again)
    assert nothing is None and torch.equal(repeated, out) and torch.equal(again, state)


def test_rows_of_a_batch_and_logarithms(device):
    torch.manual_seed(1)
    problem = Problem(([4] * 3, 2, 4, 128, 128, torch.bfloat16, torch.float32, -5.0), device)
    rows = {
        name: getattr(problem, name).reshape(3, 4, *getattr(problem, name).shape[2:])
        for name in ("q", "k", "v", "g", "beta")
    }
    rows["g"] = problem.decay().log().float().view_as(rows["g"])
    rows["beta"] = torch.sigmoid(rows["beta"].float())
    gates = dict.fromkeys(("A_log", "dt_bias", "lower_bound", "cu_seqlens"))
    out, state = problem.call(
        **rows, **gates, use_gate_in_kernel=False, beta_is_logit=False, output_final_state=True
    )
    for i in range(3):
        outputs, states = problem.expected(i, torch.zeros_like(problem.state[i]))
        assert relative_error(out[i], outputs) < problem.tolerance
        assert relative_error(state[i], states[-1]) < problem.state_tolerance


def test_drafts_keep_a_state_per_token(device):
    """Tokens leave states in slots of their own; the next call reads that of the last accepted."""
    torch.manual_seed(2)
    problem = Problem(([3] * 4, 2, 2, 64, 64, torch.bfloat16, torch.float32, -5.0), device, 14)
    slots = torch.randperm(14, device=device)[:12].view(4, 3).int()
    accepted = torch.tensor([1, 2, 3, 9], dtype=torch.int32, device=device)
    slots[2] = -1  # padding
    pool = problem.state.clone()
    out, _ = problem.call(
        initial_state=pool, ssm_state_indices=slots, num_spec_tokens=2, num_accepted_tokens=accepted
    )
    touched = torch.zeros(14, dtype=torch.bool, device=device)
    for i, source in ((0, 0), (1, 1), (3, 2)):
        outputs, states = problem.expected(i, problem.state[slots[i, source].long()])
        assert relative_error(out[0, 3 * i : 3 * i + 3], outputs) < problem.tolerance
        for t, state in enumerate(states):
            assert relative_error(pool[slots[i, t].long()], state) < problem.state_tolerance
            touched[slots[i, t].long()] = True
    assert not out[0, 6:9].any() and torch.equal(pool[~touched], problem.state[~touched])


def test_states_of_another_pool(device):
    torch.manual_seed(3)
    problem = Problem(([2] * 3, 2, 2, 128, 128, torch.bfloat16, torch.float32, -5.0), device, 9)
    source, slots = torch.randn_like(problem.state), torch.tensor([8, 0, 5], device=device)
    before = source.clone()
    problem.call(
        initial_state=problem.state, num_spec_tokens=1, initial_state_source=source,
        initial_state_indices=slots,
    )  # fmt: skip
    assert torch.equal(source, before)
    for i in range(3):
        for t, state in enumerate(problem.expected(i, source[slots[i]])[1]):
            assert relative_error(problem.state[2 * i + t], state) < problem.state_tolerance


@pytest.mark.parametrize("slots", [None, [5, -1, 0, 3, 6]], ids=["rows", "slots"])
def test_checkpoints(device, slots):
    """States after every third token of each sequence, in rows or in slots of a pool."""
    torch.manual_seed(4)
    lengths, every = [9, 0, 2, 7], 3
    problem = Problem((lengths, 2, 2, 64, 40, torch.bfloat16, torch.float32, -5.0), device)
    counts = torch.tensor([0, *(n // every for n in lengths)], device=device)
    before = torch.randn_like(problem.state[:1].expand(8, -1, -1, -1))
    pool = before.clone()
    out, state, kept = problem.call(
        initial_state=problem.state.clone(), output_final_state=True, state_checkpoints=pool,
        checkpoint_cu_starts=counts.cumsum(0), checkpoint_every_n_tokens=every,
        checkpoint_state_indices=None if slots is None else torch.tensor(slots, device=device),
    )  # fmt: skip
    assert kept is pool
    places = iter(range(5) if slots is None else slots)
    touched = torch.zeros(8, dtype=torch.bool, device=device)
    for i, length in enumerate(lengths):
        states = problem.expected(i, problem.state[i])[1]
        assert relative_error(state[i], states[-1]) < problem.state_tolerance
        for j in range(length // every):
            place = next(places)
            if place >= 0:
                assert relative_error(pool[place], states[(j + 1) * every - 1]) < 1e-5
                touched[place] = True
    assert torch.equal(pool[~touched], before[~touched]) and next(places, None) is None
    assert out.isfinite().all()


def test_refusals(device):
    problem = Problem(CASES[0], device)
    for name, wrong in {
        "q": problem.q.float(),
        "g": problem.g[..., :64],
        "beta": problem.beta[..., :1],
        "A_log": None,
        "dt_bias": problem.dt_bias[:, :64],
        "lower_bound": 1.0,
        "num_spec_tokens": 0,
        "state_checkpoints": problem.state,
        "initial_state": problem.state.transpose(-1, -2)[..., :64],
        "backend": "another",
    }.items():
        arguments = {"initial_state": problem.state.clone(), name: wrong}
        with pytest.raises((TypeError, ValueError), match=MATCHES.get(name, name)):
            problem.call(**arguments)
