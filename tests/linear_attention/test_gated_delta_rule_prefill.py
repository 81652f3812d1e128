"""Prefill of the gated delta rule against the recurrence in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashinfer._linear_attention.chunk_delta_rule import run_chunk_delta_rule
from flashinfer._linear_attention.delta_rule import GateForm, Gates, States
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from tests.linear_attention.recurrences import gated_delta_rule, relative_error

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}

# lengths, heads of q, k and v, head_dim_k, head_dim_v, dtype, state dtype, normalise, lowest decay
CASES = [
    ([100, 64, 0, 7, 150], 2, 2, 4, 128, 128, torch.bfloat16, torch.float32, True, 0.9),
    ([300], 4, 2, 2, 128, 128, torch.bfloat16, torch.bfloat16, False, 0.9),
    ([129, 65], 2, 2, 2, 64, 64, torch.bfloat16, torch.float32, True, 0.99),
    ([77, 200], 1, 1, 2, 128, 64, torch.float16, torch.float32, True, 0.5),
    ([200, 1], 1, 1, 2, 128, 128, torch.bfloat16, torch.float32, True, 0.0),
    ([70] * 70, 1, 1, 2, 128, 128, torch.bfloat16, torch.float32, True, 0.9),
    ([40, 3], 2, 2, 4, 32, 24, torch.bfloat16, torch.float32, True, 0.9),
]


class Problem:
    def __init__(self, case, device):
        lengths, q_heads, k_heads, v_heads, dim_k, dim_v, dtype, state_dtype, normalize, low = case
        total, heads = sum(lengths), max(q_heads, v_heads)
        self.bounds = [0, *itertools.accumulate(lengths)]
        self.q = torch.randn(total, q_heads, dim_k, device=device)
        self.k = torch.randn(total, k_heads, dim_k, device=device)
        if not normalize:
            self.q, self.k = (torch.nn.functional.normalize(x, dim=-1) for x in (self.q, self.k))
        self.q, self.k = self.q.to(dtype), self.k.to(dtype)
        self.v = torch.randn(total, v_heads, dim_v, dtype=dtype, device=device)
        self.g = torch.rand(total, heads, device=device) * (1 - low) + low
        self.beta = torch.rand(total, heads, device=device)
        self.initial = torch.randn(len(lengths), heads, dim_v, dim_k, device=device).to(state_dtype)
        self.normalize, self.scale = normalize, dim_k**-0.5
        self.cu_seqlens = torch.tensor(self.bounds, device=device)
        self.tolerance = TOLERANCE[dtype]

    def call(self, **changes):
        arguments = dict(
            q=self.q, k=self.k, v=self.v, g=self.g, beta=self.beta, initial_state=self.initial,
            output_final_state=True, cu_seqlens=self.cu_seqlens,
            use_qk_l2norm_in_kernel=self.normalize,
        )  # fmt: skip
        return chunk_gated_delta_rule(**{**arguments, **changes})

    def expected(self, i):
        part = slice(self.bounds[i], self.bounds[i + 1])
        if part.start == part.stop:
            return None, [self.initial[i]]
        return gated_delta_rule(
            *(x[part] for x in (self.q, self.k, self.v, self.g, self.beta)),
            self.initial[i], self.scale, self.normalize,
        )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_recurrence(device, case):
    torch.manual_seed(0)
    problem = Problem(case, device)
    heads = problem.initial.shape[1]
    out = torch.full((len(problem.q), heads, case[5]), float("nan"), dtype=case[6], device=device)
    final = torch.full_like(problem.initial, float("nan"))
    problem.call(output=out, output_state=final)
    for i in range(len(case[0])):
        outputs, states = problem.expected(i)
        if outputs is not None:
            part = out[problem.bounds[i] : problem.bounds[i + 1]]
            assert relative_error(part, outputs) < problem.tolerance
        assert relative_error(final[i], states[-1]) < problem.tolerance
    again, state = problem.call()
    assert torch.equal(again, out) and torch.equal(state, final)


def test_state_carried_over_a_split_at_every_position(device):
    torch.manual_seed(1)
    problem = Problem(([130], 1, 1, 2, 128, 128, torch.bfloat16, torch.float32, True, 0.9), device)
    outputs, states = problem.expected(0)
    for split in (1, 2, 31, 32, 63, 64, 65, 100, 128, 129):
        state, parts = problem.initial, []
        for part in (slice(0, split), slice(split, 130)):
            bounds = torch.tensor([0, part.stop - part.start], device=device)
            out, state = problem.call(
                q=problem.q[part], k=problem.k[part], v=problem.v[part], g=problem.g[part],
                beta=problem.beta[part], initial_state=state, cu_seqlens=bounds,
            )  # fmt: skip
            parts.append(out)
        assert relative_error(torch.cat(parts), outputs) < problem.tolerance
        assert relative_error(state[0], states[-1]) < problem.tolerance


@pytest.mark.parametrize("dim", [128, 64, 32])
@pytest.mark.parametrize("has_initial", [True, False])
def test_sequences_of_no_tokens_alone(device, dim, has_initial):
    case = ([0, 0], 1, 1, 2, dim, dim, torch.bfloat16, torch.float32, True, 0.9)
    problem = Problem(case, device)
    final = torch.full_like(problem.initial, float("nan"))
    initial = problem.initial if has_initial else None
    out, state = problem.call(initial_state=initial, output_state=final)
    assert state is final and out.shape == (0, 2, dim)
    assert torch.equal(final, problem.initial if has_initial else torch.zeros_like(final))


@pytest.mark.parametrize("dim", [128, 32])
@pytest.mark.parametrize("lengths", [[], [5]])
@pytest.mark.parametrize("gate", ["g", "beta"])
def test_a_gate_is_refused_by_its_name(device, dim, lengths, gate):
    case = (lengths, 1, 1, 2, dim, dim, torch.bfloat16, torch.float32, True, 0.9)
    problem = Problem(case, device)
    wrong = torch.zeros(sum(lengths), 3, device=device)
    with pytest.raises(ValueError, match=f"`{gate}`"):
        problem.call(**{gate: wrong})


def test_checkpoints_and_slots(device):
    torch.manual_seed(2)
    case = ([200, 64, 130], 2, 2, 2, 128, 128, torch.bfloat16, torch.float32, True, 0.9)
    problem = Problem(case, device)
    starts = torch.tensor([0, 3, 4, 6], device=device)
    kept = torch.full((6, *problem.initial.shape[1:]), float("nan"), device=device)
    pool = torch.randn(5, *problem.initial.shape[1:], device=device)
    slots = torch.tensor([4, 0, 2], device=device, dtype=torch.int32)
    pool[slots.long()] = problem.initial
    before = pool.clone()
    _, final = problem.call(
        initial_state=pool, state_indices=slots, state_checkpoints=kept,
        checkpoint_cu_starts=starts, checkpoint_every_n_tokens=64,
    )  # fmt: skip
    assert final is pool and torch.equal(pool[[1, 3]], before[[1, 3]])
    for i in range(3):
        states = problem.expected(i)[1]
        assert relative_error(pool[slots[i].long()], states[-1]) < problem.tolerance
        for j in range(int(starts[i + 1] - starts[i])):
            state = states[64 * (j + 1) - 1]
            assert relative_error(kept[starts[i] + j], state) < problem.tolerance


@pytest.mark.parametrize("lengths", [[5000], [300, 0, 3000, 64]], ids=str)
def test_stages_at_once_give_the_same_bits(device, lengths):
    torch.manual_seed(5)
    case = (lengths, 2, 2, 4, 128, 128, torch.bfloat16, torch.float32, True, 0.9)
    problem = Problem(case, device)
    results = []
    for at_once in (False, True, True, True):
        out = torch.full_like(problem.v, float("nan"))[None]
        final = torch.full_like(problem.initial, float("nan"))
        run_chunk_delta_rule(
            out, problem.q[None], problem.k[None], problem.v[None],
            Gates(problem.g[None], problem.beta[None], GateForm.LINEAR),
            States(problem.initial, final), problem.cu_seqlens, scale=problem.scale,
            normalize_qk=True, at_once=at_once,
        )  # fmt: skip
        results.append((out, final))
    for out, final in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(final, results[0][1])


def test_defaults(device):
    torch.manual_seed(3)
    problem = Problem(CASES[0], device)
    out = problem.call(g=None, beta=None, initial_state=None, output_final_state=False)
    ones = torch.ones_like(problem.g)
    same, _ = problem.call(g=ones, beta=ones, initial_state=torch.zeros_like(problem.initial))
    assert torch.equal(out, same)


def test_refusals(device):
    problem = Problem(CASES[0], device)
    for name, wrong in {
        "q": problem.q.float(),
        "k": problem.k[..., :64],
        "v": problem.v[:, :3],
        "g": problem.g.double(),
        "beta": problem.beta[:-1],
        "cu_seqlens": None,
        "initial_state": problem.initial[:, :, :64],
        "checkpoint_every_n_tokens": 64,
        "backend": "cudnn",
    }.items():
        with pytest.raises((TypeError, ValueError), match=name):
            problem.call(**{name: wrong})
