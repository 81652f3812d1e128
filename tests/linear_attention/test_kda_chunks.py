"""Prompts of Kimi Delta Attention and Gated DeltaNet-2, which are walked in chunks, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from flashinfer._linear_attention import by_channel
from flashinfer._linear_attention.delta_rule import GateForm, Gates, States
from flashinfer.gdn2_prefill import chunk_gated_delta_rule2
from flashinfer.kda import recurrent_kda
from tests.linear_attention.recurrences import gated_delta_rule, relative_error

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 7e-3, F16: 1e-3}

# lengths, heads, v_heads, head_dim_k, head_dim_v, dtype, state dtype, gate dtype, gate form,
# normalise. "steep": decays from 1 to e^-60, "closed": the lowest are zero.
CASES = [
    ([300, 64, 0, 150], 2, 4, 128, 128, BF16, F32, BF16, "bounded", True),
    ([257], 2, 2, 128, 64, BF16, BF16, F32, "softplus", True),
    ([129, 200], 1, 3, 64, 128, BF16, F32, F32, "logarithm", False),
    ([333], 2, 2, 128, 128, F16, F32, F16, "bounded", True),
    ([200, 130, 1, 500], 1, 1, 128, 128, BF16, F32, F32, "steep", True),
    ([300], 1, 2, 64, 64, BF16, F16, F32, "closed", True),
    ([150] * 40, 1, 2, 128, 128, BF16, F32, BF16, "softplus", True),
]


class Problem:
    """Random operands of packed sequences, a batch of one."""

    def __init__(self, case, device):
        lengths, heads, v_heads, dim_k, dim_v, dtype, state, gate, self.form, normalize = case
        self.bounds = [0, *itertools.accumulate(lengths)]
        total = self.bounds[-1]
        self.cu_seqlens = torch.tensor(self.bounds, device=device)

        def new(*shape):
            return torch.randn(shape, device=device)

        self.q, self.k = (new(1, total, heads, dim_k) for _ in "qk")
        if not normalize:
            self.q, self.k = (F.normalize(x, dim=-1) for x in (self.q, self.k))
        self.q, self.k = self.q.to(dtype), self.k.to(dtype)
        self.v = new(1, total, v_heads, dim_v).to(dtype)
        self.g = new(1, total, v_heads, dim_k)
        if self.form == "logarithm":
            self.g = -self.g.abs() * 0.1
        elif self.form in ("steep", "closed"):
            self.g = -60 * torch.rand_like(self.g) ** 8
            if self.form == "closed":
                self.g[self.g < -10] = -torch.inf
        self.g = self.g.to(gate)
        self.beta = new(1, total, v_heads).to(gate)
        self.A_log, self.dt_bias = new(v_heads), new(v_heads, dim_k)
        self.state = new(len(lengths), v_heads, dim_v, dim_k).to(state)
        self.normalize, self.tolerance = normalize, TOLERANCE[dtype]
        self.bound = -5.0 if self.form == "bounded" else None

    @property
    def has_gate(self):
        return self.form in ("bounded", "softplus")

    def call(self, **changes):
        arguments = dict(
            q=self.q, k=self.k, v=self.v, g=self.g, beta=self.beta, beta_is_logit=True,
            cu_seqlens=self.cu_seqlens, use_qk_l2norm_in_kernel=self.normalize,
        )  # fmt: skip
        if self.has_gate:
            arguments |= dict(
                A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=self.bound,
                use_gate_in_kernel=True,
            )  # fmt: skip
        return recurrent_kda(**{**arguments, **changes})

    def decay(self):
        if not self.has_gate:
            return self.g.double().exp()
        rate, shifted = self.A_log.double().exp()[:, None], self.g.double() + self.dt_bias.double()
        if self.bound is None:
            return torch.exp(-rate * F.softplus(shifted))
        return torch.exp(self.bound * torch.sigmoid(rate * shifted))

    def expected(self, i, state):
        """Outputs and states of sequence i from `state`."""
        part = slice(self.bounds[i], self.bounds[i + 1])
        if part.start == part.stop:
            return None, [state]
        tensors = (self.q, self.k, self.v, self.decay(), torch.sigmoid(self.beta.double()))
        inputs = (x[0, part] for x in tensors)
        return gated_delta_rule(*inputs, state, self.q.shape[-1] ** -0.5, self.normalize)

    def check(self, out, states, starts=None):
        """Outputs and last states of all sequences, which began with `starts`."""
        starts = self.state if starts is None else starts
        for i in range(len(self.bounds) - 1):
            outputs, expected = self.expected(i, starts[i])
            if outputs is not None:
                part = out[0, self.bounds[i] : self.bounds[i + 1]]
                assert relative_error(part, outputs) < self.tolerance, i
            assert relative_error(states[i], expected[-1]) < self.tolerance, i

    def run_chunks(self, part, state, **options):
        """One sequence of the tokens of `part`, in chunks however few they are."""
        form = GateForm.LOG
        if self.has_gate:
            form = GateForm.SOFTPLUS if self.bound is None else GateForm.LOWER_BOUND
        gates = Gates(
            self.g[:, part], self.beta[:, part], form, self.A_log if self.has_gate else None,
            self.dt_bias if self.has_gate else None, self.bound or 0.0, True, True,
        )  # fmt: skip
        q, k, v = (x[:, part] for x in (self.q, self.k, self.v))
        out, final = torch.full_like(v, float("nan")), torch.full_like(state, float("nan"))
        bounds = torch.tensor([0, q.shape[1]], dtype=torch.int32, device=q.device)
        by_channel.run_chunk_kda(
            out, q, k, v, gates, States(state, final), bounds, scale=q.shape[-1] ** -0.5,
            normalize_qk=self.normalize, **options,
        )  # fmt: skip
        return out, final


@pytest.fixture
def walked(monkeypatch):
    """Calls that are walked token by token."""
    calls = []
    monkeypatch.setattr(by_channel, "run_delta_rule", lambda *args, **rest: calls.append(args))
    return calls


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_sequences(device, case, walked):
    torch.manual_seed(0)
    problem = Problem(case, device)
    state, out = problem.state.clone(), torch.full_like(problem.v, float("nan"))
    returned = problem.call(initial_state=state, output=out, output_final_state=True)
    assert returned[0] is out and returned[1] is state and not walked
    problem.check(out, state)
    again = problem.state.clone()
    repeated, _ = problem.call(initial_state=again)
    assert torch.equal(repeated, out) and torch.equal(again, state)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_no_worse_than_the_walk(device, case):
    """The error of chunks is that of their 16-bit operands, beside the rounding of outputs."""
    torch.manual_seed(6)
    problem = Problem(case, device)
    chunks, _ = problem.call(initial_state=problem.state.clone())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_channel, "TOKENS_FOR_CHUNKS", 1 << 30)
        tokens, _ = problem.call(initial_state=problem.state.clone())
    assert relative_error(chunks, tokens) < problem.tolerance


def test_rows_of_a_batch_and_zeros(device, walked):
    """A batch without `cu_seqlens`, one row of it, and states that begin with zeros."""
    torch.manual_seed(1)
    problem = Problem(([200] * 3, 2, 4, 128, 128, BF16, F32, BF16, "bounded", True), device)
    rows = {
        name: getattr(problem, name).reshape(3, 200, *getattr(problem, name).shape[2:])
        for name in ("q", "k", "v", "g", "beta")
    }
    out, state = problem.call(**rows, cu_seqlens=None, output_final_state=True)
    problem.check(out.flatten(0, 1)[None], state, torch.zeros_like(problem.state))
    one, last = problem.call(
        **{name: row[1:2] for name, row in rows.items()}, cu_seqlens=None, output_final_state=True
    )
    assert torch.equal(one[0], out[1]) and torch.equal(last[0], state[1]) and not walked


@pytest.mark.parametrize("position", [1, 7, 8, 31, 63, 64, 65, 100, 127, 128, 129])
def test_state_carried_over_a_split(device, position):
    torch.manual_seed(2)
    problem = Problem(([130], 1, 2, 128, 128, BF16, F32, BF16, "softplus", True), device)
    first, state = problem.run_chunks(slice(0, position), problem.state)
    second, state = problem.run_chunks(slice(position, 130), state)
    problem.check(torch.cat([first, second], dim=1), state)


def test_slots_padding_and_checkpoints(device, walked):
    torch.manual_seed(3)
    problem = Problem(([200, 64, 190], 2, 2, 128, 128, BF16, F32, BF16, "bounded", True), device)
    pool = torch.randn(6, *problem.state.shape[1:], device=device)
    slots = torch.tensor([4, -1, 2], dtype=torch.int32, device=device)
    before = pool.clone()
    starts = torch.tensor([0, 3, 4, 6], device=device)
    kept = torch.full((6, *pool.shape[1:]), float("nan"), device=device)
    out = torch.full_like(problem.v, float("nan"))
    problem.call(
        initial_state=pool, ssm_state_indices=slots, output=out, state_checkpoints=kept,
        checkpoint_cu_starts=starts, checkpoint_every_n_tokens=64,
    )  # fmt: skip
    assert not out[0, 200:264].any() and torch.equal(pool[[0, 1, 3, 5]], before[[0, 1, 3, 5]])
    for i in (0, 2):
        outputs, states = problem.expected(i, before[slots[i].long()])
        part = out[0, problem.bounds[i] : problem.bounds[i + 1]]
        assert relative_error(part, outputs) < problem.tolerance
        assert relative_error(pool[slots[i].long()], states[-1]) < problem.tolerance
        for j in range(len(states) // 64):
            place = kept[starts[i] + j]
            assert relative_error(place, states[64 * (j + 1) - 1]) < problem.tolerance
    assert not walked


def test_states_of_another_pool_and_frozen_ones(device, walked):
    torch.manual_seed(4)
    problem = Problem(([150, 170], 1, 2, 128, 64, BF16, BF16, BF16, "bounded", True), device)
    source, slots = torch.randn(5, *problem.state.shape[1:], device=device), [3, 0]
    source, before = source.to(BF16), problem.state.clone()
    indices = torch.tensor(slots, device=device)
    out, _ = problem.call(
        initial_state=problem.state, initial_state_source=source, initial_state_indices=indices
    )
    problem.check(out, problem.state, source[slots])
    problem.state.copy_(before)
    again, _ = problem.call(initial_state=problem.state, disable_state_update=True)
    assert torch.equal(problem.state, before) and not walked
    for i in range(2):
        part = again[0, problem.bounds[i] : problem.bounds[i + 1]]
        outputs, _ = problem.expected(i, before[i])
        assert relative_error(part, outputs) < problem.tolerance


@pytest.mark.parametrize("tokens", [700, 5000])
def test_schedules_and_stages_at_once_give_the_same_bits(device, tokens):
    torch.manual_seed(5)
    problem = Problem(([tokens], 2, 4, 128, 128, BF16, F32, BF16, "bounded", True), device)
    whole = slice(0, tokens)
    expected = problem.run_chunks(whole, problem.state, at_once=False, schedule=4)
    for at_once, schedule in ((False, 8), (True, 4), (True, 4), (True, 4)):
        found = problem.run_chunks(whole, problem.state, at_once=at_once, schedule=schedule)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_chunks_do_not_serve_is_walked(device, walked):
    problem = Problem(([150, 150], 1, 2, 128, 128, BF16, F32, BF16, "bounded", True), device)
    gap = torch.randn(1, 300, 2, 129, device=device).to(BF16)
    calls = {
        "short": dict(cu_seqlens=torch.arange(0, 301, 30, device=device)),
        "gate of odd strides": dict(g=gap[..., :128]),
        "values of 40": dict(v=problem.v[..., :40]),
        "checkpoints of 3": dict(
            state_checkpoints=problem.state.repeat(50, 1, 1, 1), checkpoint_every_n_tokens=3,
            checkpoint_cu_starts=torch.tensor([0, 50, 100], device=device),
        ),
        "states of tokens": dict(
            initial_state=problem.state.repeat(150, 1, 1, 1), num_spec_tokens=149
        ),
    }  # fmt: skip
    for number, (name, changes) in enumerate(calls.items(), 1):
        problem.call(**changes)
        assert len(walked) == number, name


@pytest.mark.parametrize("rates", ["some", "zero"])
def test_gated_delta_rule2(device, rates, walked):
    """Its scaled decays exceed 1 where the erase gate grows."""
    torch.manual_seed(7)
    tokens, heads, dim = 300, 2, 128
    q, k, v = (torch.randn(tokens, heads, dim, device=device).to(BF16) for _ in "qkv")
    g = -torch.rand(tokens, heads, dim, device=device) * 0.2
    erase = torch.rand(tokens, heads, dim, device=device)
    if rates == "zero":
        erase[erase < 0.2] = 0.0
    write = torch.rand(tokens, heads, dim, device=device)
    start = torch.randn(1, heads, dim, dim, device=device)
    out, final = chunk_gated_delta_rule2(
        q, k, v, g, erase, write, initial_state=start, output_final_state=True,
        cu_seqlens=torch.tensor([0, tokens], device=device), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    state, unit = start[0].double(), [F.normalize(x.double(), dim=-1) for x in (q, k)]
    for t in range(tokens):
        state = state * g[t, :, None].double().exp()
        seen = (state * (erase[t] * unit[1][t])[:, None]).sum(-1)
        state = state + (write[t] * v[t] - seen)[..., None] * unit[1][t, :, None]
        expected = dim**-0.5 * (state * unit[0][t][:, None]).sum(-1)
        assert relative_error(out[t], expected) < 0.03, t
    assert relative_error(final[0], state) < 1e-2 and not walked
