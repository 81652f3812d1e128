"""Properties of merges that random calls do not single out; the concatenation of MLA's keys."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.concat_ops import concat_mla_k
from flashinfer.testing import CheckOptions, assert_matches_reference, error_bound


def _attention(q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and base-2 log-sum-exp of q[h, d] over k, v[n, h, d], in float64."""
    logits = torch.einsum("hd,nhd->nh", q, k)
    lse = torch.logsumexp(logits, 0)
    out = torch.einsum("nh,nhd->hd", (logits - lse).exp(), v)
    return out, lse * torch.log2(torch.tensor(torch.e, dtype=torch.float64))


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_merged_attention_over_parts_is_attention_over_all(parts, device):
    q = torch.randn(4, 64, dtype=torch.float64)
    k, v = torch.randn(2, 90, 4, 64, dtype=torch.float64)
    states = [_attention(q, *x) for x in zip(k.chunk(parts), v.chunk(parts), strict=True)]
    outs = torch.stack([out for out, _ in states])[None].float().to(device)
    lses = torch.stack([lse for _, lse in states])[None].float().to(device)
    merged, lse = flashinfer.merge_states(outs, lses)
    whole, whole_lse = _attention(q, k, v)
    torch.testing.assert_close(merged[0].cpu().double(), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[0].cpu().double(), whole_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("states", [0, 1, 2, 3, 8, 9])
def test_states_without_keys_merge_to_zero_and_minus_infinity(states, device):
    v = torch.full((3, states, 2, 64), float("nan"), dtype=torch.bfloat16, device=device)
    s = torch.full((3, states, 2), float("-inf"), device=device)
    merged, lse = flashinfer.merge_states(v, s)
    assert merged.eq(0).all() and lse.eq(float("-inf")).all()


def test_two_empty_states_merge_in_place(device):
    v, v_other = torch.full((2, 3, 2, 64), float("nan"), device=device)
    s, s_other = torch.full((2, 3, 2), float("-inf"), device=device)
    flashinfer.merge_state_in_place(v, s, v_other, s_other)
    assert v.eq(0).all() and s.eq(float("-inf")).all()


def test_a_state_without_keys_changes_nothing(device):
    v, v_other = torch.randn(2, 5, 4, 128, dtype=torch.bfloat16, device=device)
    s, s_other = torch.randn(5, 4, device=device), torch.full((5, 4), -torch.inf, device=device)
    for first, second in (((v, s), (v_other, s_other)), ((v_other, s_other), (v, s))):
        merged, lse = flashinfer.merge_state(*first, *second)
        assert torch.equal(merged, v) and torch.equal(lse, s)


@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_with_and_without_gaps_merge_alike(heads, masked, device):
    v = torch.randn(2, 37, heads, 128, dtype=torch.bfloat16, device=device)
    s = torch.randn(2, 37, heads, device=device)
    s[0, ::3] = s[1, ::2] = -torch.inf
    apart = torch.zeros(2, 37, heads, 136, dtype=torch.bfloat16, device=device)[..., :128].copy_(v)
    first = v[0].clone()
    merged, lse = flashinfer.merge_state(v[0], s[0], v[1], s[1])
    for states in (v, apart):
        actual, actual_lse = flashinfer.merge_state(states[0], s[0], states[1], s[1])
        assert torch.equal(actual, merged) and torch.equal(actual_lse, lse)
        mask = torch.rand(37, device=device) < 0.5 if masked else None
        keep = torch.zeros(37, dtype=torch.bool, device=device) if mask is None else ~mask
        out, out_s = states[0], s[0].clone()
        flashinfer.merge_state_in_place(out, out_s, states[1], s[1], mask=mask)
        assert torch.equal(out, torch.where(keep[:, None, None], first, merged))
        assert torch.equal(out_s, torch.where(keep[:, None], s[0], lse))


@pytest.mark.parametrize("stride", [0, 1, 3])
def test_a_mask_may_be_a_view(stride, device):
    states = [torch.randn(17, 2, 64, device=device), torch.randn(17, 2, device=device)]
    others = [torch.randn(17, 2, 64, device=device), torch.randn(17, 2, device=device)]
    bits = torch.rand(52, device=device) < 0.5
    mask = bits[1:].as_strided((17,), (stride,))
    expected = [tensor.clone() for tensor in states]
    flashinfer.merge_state_in_place(*expected, *others, mask=mask.clone())
    flashinfer.merge_state_in_place(*states, *others, mask=mask)
    assert all(torch.equal(a, e) for a, e in zip(states, expected, strict=True))


def test_nan_is_not_lost(device):
    v = torch.randn(1, 2, 1, 64, device=device)
    for bad in (torch.nan, torch.inf):
        s = torch.tensor([[[bad], [-torch.inf]]], device=device)
        merged, lse = flashinfer.merge_states(v, s)
        assert merged.isnan().all() and lse.isnan().all()


def test_large_exponents_do_not_overflow(device):
    v = torch.randn(2, 3, 2, 64, device=device)
    s = torch.tensor([3e4, 3e4 + 1, -3e4], device=device)[None, :, None].expand(2, 3, 2)
    bound = CheckOptions(bound=error_bound(torch.float32, 8, magnitude=4.0), check_bias=False)
    merged, lse = flashinfer.merge_states(v, s)
    expected = (v[:, 0].double() + 2 * v[:, 1].double()) / 3
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-5)
    assert lse.isfinite().all()
    short = flashinfer.merge_state
    pairs = {"v_a": v[:, 0], "s_a": s[:, 0] / 1e4, "v_b": v[:, 1], "s_b": s[:, 1] / 1e4}
    assert_matches_reference(short, bound, **pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "nope", "shared"), [(128, 128, 64), (3, 7, 5), (1, 0, 8)])
def test_concat_mla_k(dtype, heads, nope, shared, device):
    values = torch.randn(6, heads, nope + shared, device=device).to(dtype)
    k_nope, k_rope = values[..., :nope], values[:, :1, nope:]
    assert_matches_reference(concat_mla_k, k=torch.empty_like(values), k_nope=k_nope, k_rope=k_rope)


def test_concat_mla_k_takes_strided_parts(device):
    wide = torch.randn(6, 4, 100, device=device)
    k = torch.empty(4, 6, 24, device=device).transpose(0, 1)
    assert_matches_reference(concat_mla_k, k=k, k_nope=wide[..., 3:19], k_rope=wide[:, 1:2, 40:48])
