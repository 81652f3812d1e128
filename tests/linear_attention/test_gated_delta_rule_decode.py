"""Decode of the gated delta rule against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from flashinfer._linear_attention.decode import run_decode
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
from flashinfer.gdn_kernels import gdn_decode_bf16_state
from tests.linear_attention.recurrences import STORAGE_ERROR, gated_delta_rule, relative_error

pytestmark = pytest.mark.gpu

# batch, tokens, heads, v_heads, head_dim_k, head_dim_v, dtype, state dtype
CASES = [
    (1, 1, 2, 4, 128, 128, torch.bfloat16, torch.float32),
    (40, 1, 4, 8, 128, 128, torch.bfloat16, torch.bfloat16),
    (3, 4, 2, 4, 128, 128, torch.bfloat16, torch.bfloat16),
    (2, 11, 1, 3, 64, 40, torch.float16, torch.float16),
    (2, 2, 2, 2, 32, 24, torch.bfloat16, torch.float32),
    (2, 3, 2, 2, 256, 256, torch.bfloat16, torch.float32),
]


class Problem:
    """Random inputs, and what the recurrence makes of them for given slots."""

    def __init__(self, case, device, slots=None):
        batch, tokens, heads, v_heads, dim_k, dim_v, dtype, state_dtype = case
        self.q, self.k = (
            torch.randn(batch, tokens, heads, dim_k, dtype=dtype, device=device) for _ in "qk"
        )
        self.v = torch.randn(batch, tokens, v_heads, dim_v, dtype=dtype, device=device)
        self.a, self.b = (
            torch.randn(batch, tokens, v_heads, dtype=dtype, device=device) for _ in "ab"
        )
        self.A_log, self.dt_bias = (torch.randn(v_heads, device=device) for _ in "Ad")
        count = batch if slots is None else slots
        self.pool = torch.randn(count, v_heads, dim_v, dim_k, device=device).to(state_dtype)
        self.tolerance = 1.5 * STORAGE_ERROR[dtype]
        self.state_tolerance = STORAGE_ERROR[state_dtype]
        self.scale = dim_k**-0.5

    def inputs(self):
        return dict(
            q=self.q, k=self.k, v=self.v, A_log=self.A_log, a=self.a, dt_bias=self.dt_bias, b=self.b
        )

    def expected(self, sequence, slot, normalize=True):
        rate = torch.nn.functional.softplus(self.a.double() + self.dt_bias.double())
        decay = torch.exp(-self.A_log.double().exp() * rate)
        return gated_delta_rule(
            *(x[sequence] for x in (self.q, self.k, self.v, decay, torch.sigmoid(self.b.double()))),
            self.pool[slot],
            self.scale,
            normalize,
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_per_sequence(device, case):
    torch.manual_seed(0)
    problem = Problem(case, device)
    state, out = problem.pool.clone(), torch.full_like(problem.v, float("nan"))
    got = gated_delta_rule_decode_pretranspose(**problem.inputs(), state=state, output=out)
    assert got[0] is out and got[1] is state
    for i in range(case[0]):
        outputs, states = problem.expected(i, i)
        assert relative_error(out[i], outputs) < problem.tolerance
        assert relative_error(state[i], states[-1]) < problem.state_tolerance
    again = problem.pool.clone()
    repeated, _ = gated_delta_rule_decode_pretranspose(**problem.inputs(), state=again)
    assert torch.equal(repeated, out) and torch.equal(again, state)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_with_value_channels_last(device, case):
    torch.manual_seed(4)
    problem = Problem(case, device)
    state = problem.pool.transpose(-1, -2).contiguous()
    inputs = problem.inputs()
    gates = tuple(inputs.pop(name) for name in ("A_log", "a", "dt_bias", "b"))
    options = {"normalize_qk": True, "frozen": False, "key_major": True}
    out = run_decode(**inputs, pool=state, gates=gates, scale=None, output=None, **options)
    for i in range(case[0]):
        outputs, states = problem.expected(i, i)
        assert relative_error(out[i], outputs) < problem.tolerance
        assert relative_error(state[i].transpose(-1, -2), states[-1]) < problem.state_tolerance
    again = problem.pool.transpose(-1, -2).contiguous()
    repeated = run_decode(**inputs, pool=again, gates=gates, scale=None, output=None, **options)
    assert torch.equal(repeated, out) and torch.equal(again, state)


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_pool_with_padding(device, case):
    torch.manual_seed(1)
    batch = case[0]
    problem = Problem(case, device, slots=2 * batch + 1)
    slots = torch.randperm(2 * batch + 1, device=device)
    read, write = slots[:batch].int(), slots[batch : 2 * batch].long()
    read[0] = -1
    pool = problem.pool.clone()
    buffer = torch.full(
        (batch, case[1] + 1, *pool.shape[1:]), float("nan"), dtype=pool.dtype, device=device
    )
    out, _ = gated_delta_rule_decode_pretranspose(
        **problem.inputs(),
        state=None,
        initial_state=pool,
        initial_state_indices=read,
        output_state_indices=write,
        intermediate_states_buffer=buffer,
        use_qk_l2norm=False,
    )
    untouched = torch.ones(len(pool), dtype=torch.bool, device=device)
    assert not out[0].any() and buffer[0].isnan().all()
    for i in range(1, batch):
        outputs, states = problem.expected(i, int(read[i]), normalize=False)
        assert relative_error(out[i], outputs) < problem.tolerance
        assert relative_error(pool[write[i]], states[-1]) < problem.state_tolerance
        for t, state in enumerate(states):
            assert relative_error(buffer[i, t], state) < problem.state_tolerance
        untouched[write[i]] = False
    assert torch.equal(pool[untouched], problem.pool[untouched])


def test_verification_leaves_the_pool(device):
    torch.manual_seed(2)
    problem = Problem(CASES[2], device, slots=5)
    pool, read = problem.pool.clone(), torch.tensor([4, 0, 2], device=device)
    out, returned = gated_delta_rule_mtp(
        **problem.inputs(), initial_state=pool, initial_state_indices=read
    )
    assert returned is pool and torch.equal(pool, problem.pool)
    for i in range(3):
        assert relative_error(out[i], problem.expected(i, int(read[i]))[0]) < problem.tolerance


def test_slot_per_token(device):
    torch.manual_seed(3)
    problem = Problem(CASES[2], device, slots=16)
    pool, read = problem.pool.clone(), torch.tensor([15, 14, 13], device=device)
    tokens = torch.arange(12, device=device).view(3, 4).int()
    tokens[1, 2] = -1
    gdn_decode_bf16_state.gated_delta_rule_mtp(
        **problem.inputs(),
        initial_state_source=pool,
        initial_state_indices=read,
        ssm_state_indices=tokens,
    )
    for i in range(3):
        for t, state in enumerate(problem.expected(i, int(read[i]))[1]):
            slot = int(tokens[i, t])
            if slot >= 0:
                assert relative_error(pool[slot], state) < problem.state_tolerance
    assert torch.equal(pool[12:], problem.pool[12:]) and torch.equal(pool[6], problem.pool[6])


def test_refusals(device):
    problem = Problem(CASES[0], device)
    inputs = problem.inputs()
    call = gated_delta_rule_decode_pretranspose
    for name, wrong in {
        "q": inputs["q"].float(),
        "k": inputs["k"][..., :64],
        "v": inputs["v"][:, :, :3],
        "A_log": inputs["A_log"].double(),
        "a": inputs["a"][:, :, :2],
    }.items():
        state = problem.pool.clone()
        with pytest.raises(ValueError, match=name):
            call(**{**inputs, name: wrong}, state=state)
        assert torch.equal(state, problem.pool)
    with pytest.raises(ValueError, match="state"):
        call(**inputs, state=None)
    with pytest.raises(ValueError, match="backend"):
        call(**inputs, state=problem.pool, backend="rubin")
    with pytest.raises(ValueError, match="initial_state"):
        call(**inputs, state=None, initial_state=problem.pool.transpose(-1, -2))
