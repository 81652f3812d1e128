"""Functions that are other faces of the recurrent kernels, against the recurrences in float64."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gdn_decode import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
)
from flashinfer.gdn_prefill import chunk_gated_delta_product
from flashinfer.kda import recurrent_kda
from flashinfer.kda_decode import packed_kda_decode
from tests.linear_attention.recurrences import relative_error

BF16 = torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 3])
def test_both_layouts_of_states_agree(device: torch.device, tokens: int) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(3, tokens, 2, 128, dtype=BF16, device=device) for _ in "qk")
    v = torch.randn(3, tokens, 4, 64, dtype=BF16, device=device)
    a, b = (torch.randn(3, tokens, 4, dtype=BF16, device=device) for _ in "ab")
    A_log, dt_bias = (torch.randn(4, device=device) for _ in "Ad")
    rows = torch.randn(3, 4, 64, 128, device=device)
    columns = rows.transpose(2, 3).contiguous()
    gates = (A_log, a, dt_bias, b)
    expected, expected_state = gated_delta_rule_decode_pretranspose(q, k, v, rows, *gates)
    got, state = gated_delta_rule_decode(q, k, v, columns, *gates)
    assert state is columns
    assert relative_error(got, expected.double()) < 4e-3
    assert relative_error(state.transpose(2, 3), expected_state.double()) < 1e-5


@pytest.mark.parametrize("steps", [1, 3])
def test_product_of_several_updates(device: torch.device, steps: int) -> None:
    torch.manual_seed(1)
    lengths, heads, dim = [70, 1, 20], 2, 64
    total = sum(lengths)
    q = torch.randn(total, heads, dim, dtype=BF16, device=device)
    k, v = (torch.randn(total * steps, heads, dim, dtype=BF16, device=device) for _ in "kv")
    g, beta = (
        torch.rand(total, heads, device=device),
        torch.rand(total * steps, heads, device=device),
    )
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    start = torch.randn(len(lengths), heads, dim, dim, device=device)
    out, final = chunk_gated_delta_product(
        q, k, v, g, beta, steps, 0.2, start.clone(), True, bounds, True
    )
    unit = torch.nn.functional.normalize
    row = 0
    for i, length in enumerate(lengths):
        state, expected = start[i].double(), []
        for _ in range(length):
            state = state * g[row].double()[:, None, None]
            for j in range(row * steps, (row + 1) * steps):
                key = unit(k[j].double(), dim=-1)
                delta = v[j].double() - torch.einsum("hvk,hk->hv", state, key)
                state = state + torch.einsum("h,hv,hk->hvk", beta[j].double(), delta, key)
            expected.append(0.2 * torch.einsum("hvk,hk->hv", state, unit(q[row].double(), dim=-1)))
            row += 1
        assert relative_error(out[row - length : row], torch.stack(expected)) < 1.5e-2
        assert relative_error(final[i], state) < 1.5e-2


def test_product_refuses_other_rows(device: torch.device) -> None:
    x, bounds = torch.zeros(6, 2, 64, dtype=BF16, device=device), torch.tensor([0, 6])
    with pytest.raises(ValueError, match="num_householder"):
        chunk_gated_delta_product(x, x, x, num_householder=2, cu_seqlens=bounds.to(device))


@pytest.mark.gpu
def test_packed_kda(device: torch.device) -> None:
    torch.manual_seed(2)
    batch, heads, dim = 5, 12, 128
    mixed = torch.randn(batch, 3 * heads * dim, dtype=BF16, device=device)
    gate = torch.randn(batch, heads * dim, dtype=BF16, device=device)
    beta = torch.randn(batch, heads, dtype=BF16, device=device)
    A_log, bias = torch.randn(heads, device=device), torch.randn(heads * dim, device=device)
    pool = torch.randn(7, heads, dim, dim, dtype=BF16, device=device)
    slots = torch.tensor([3, -1, 6, 0, 2], dtype=torch.int32, device=device)
    expected_pool = pool.clone()
    q, k, v = (x.reshape(batch, 1, heads, dim).contiguous() for x in mixed.chunk(3, 1))
    expected, _ = recurrent_kda(
        q, k, v, gate.view(batch, 1, heads, dim), beta[:, None], A_log, bias.view(heads, dim),
        initial_state=expected_pool, use_gate_in_kernel=True, lower_bound=-5.0,
        ssm_state_indices=slots, beta_is_logit=True,
    )  # fmt: skip
    out = packed_kda_decode(mixed, gate, beta, A_log, bias, pool, slots)
    assert torch.equal(out, expected) and torch.equal(pool, expected_pool) and not out[1].any()


def test_packed_kda_refuses_other_shapes() -> None:
    gate, pool = torch.zeros(2, 256, dtype=BF16), torch.zeros(3, 2, 128, 128, dtype=BF16)
    mixed, beta, rate = torch.zeros(2, 768, dtype=BF16), torch.zeros(2, 2), torch.zeros(2)
    slots = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="raw_gate"):
        packed_kda_decode(mixed, gate[:, 1:], beta, rate, gate[0], pool, slots)
    with pytest.raises(ValueError, match="dt_bias"):
        packed_kda_decode(mixed, gate, beta, rate, gate[0, 1:], pool, slots)
