"""Properties of rotary embeddings that random calls do not single out."""

from __future__ import annotations

import pytest
import torch

from flashinfer import rope
from flashinfer.testing import CheckOptions, assert_matches_reference, error_bound
from flashinfer.trace.templates.rope import apply_rope_with_cos_sin_cache_trace

BOUND = CheckOptions(bound=error_bound(torch.float32, 8, magnitude=8.0))


def _heads(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=device).clamp(-3, 3).to(dtype)


def _cache(rows: int, rotary_dim: int, device: torch.device) -> torch.Tensor:
    angle = torch.randn(rows, rotary_dim // 2, device=device)
    return torch.cat([angle.cos(), angle.sin()], -1)


@pytest.mark.parametrize("position", [10**6 + 1, 2**24 + 3, 2**31 - 1, -7])
@pytest.mark.parametrize("scale", [1.0, 0.1, 8.0])
def test_angles_are_exact_at_any_position(position, scale, device):
    """A float32 angle of a million radians would be wrong in its second digit."""
    pos_ids = torch.tensor([position, 0], dtype=torch.int64, device=device)
    q, k = _heads(device, 2, 3, 128), _heads(device, 2, 1, 128)
    arguments = {"pos_ids": pos_ids, "rope_scale": scale, "rope_theta": 1e4}
    # The float64 reference itself loses position * 2^-53 radians.
    assert_matches_reference(rope.apply_rope_pos_ids, BOUND, q=q, k=k, **arguments)


def test_position_zero_is_the_identity(device):
    q, k = (_heads(device, 4, heads, 64, dtype=torch.bfloat16) for heads in (3, 1))
    pos_ids = torch.zeros(4, dtype=torch.int32, device=device)
    q_out, k_out = rope.apply_rope_pos_ids(q, k, pos_ids)
    assert torch.equal(q_out, q) and torch.equal(k_out, k)


def test_tokens_of_no_request_keep_their_values(device):
    q, k = _heads(device, 10, 2, 32), _heads(device, 10, 1, 32)
    indptr = torch.tensor([2, 5, 5, 7], dtype=torch.int32, device=device)
    offsets = torch.tensor([1000, 5, 3], dtype=torch.int32, device=device)
    q_out, k_out = rope.apply_rope(q, k, indptr, offsets)
    outside = [0, 1, 7, 8, 9]
    assert torch.equal(q_out[outside], q[outside]) and torch.equal(k_out[outside], k[outside])
    assert not torch.equal(q_out[2:7], q[2:7])
    assert_matches_reference(
        rope.apply_rope,
        BOUND,
        q=q,
        k=k,
        indptr=indptr,
        offsets=offsets,
        rope_scale=1.0,
        rope_theta=1e4,
    )


@pytest.mark.parametrize("requests", [1, 127, 128, 129, 1000])
def test_requests_are_found_among_many(requests, device):
    """The search looks at as many bounds at once as a CTA has threads."""
    lengths = torch.randint(0, 4, (requests,))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().to(device)
    offsets = torch.randint(0, 5000, (requests,), dtype=torch.int32, device=device)
    tokens = max(int(indptr[-1]), 1)
    q, k = _heads(device, tokens, 1, 16), _heads(device, tokens, 1, 16)
    assert_matches_reference(
        rope.apply_rope,
        BOUND,
        q=q,
        k=k,
        indptr=indptr,
        offsets=offsets,
        rope_scale=1.0,
        rope_theta=1e4,
    )


@pytest.mark.parametrize("is_neox", [True, False])
def test_position_outside_the_cache_gives_nan(is_neox, device):
    cache = _cache(10, 32, device)
    positions = torch.tensor([9, 10, -1, 2**40], dtype=torch.int64, device=device)
    query, key = _heads(device, 4, 2 * 64), _heads(device, 4, 64)
    results = rope.apply_rope_with_cos_sin_cache(positions, query, key, 64, cache, is_neox)
    for out, original in zip(results, (query, key), strict=True):
        heads, before = out.view(4, -1, 64), original.view(4, -1, 64)
        assert heads[0].isfinite().all()
        assert heads[1:, :, :32].isnan().all()
        assert torch.equal(heads[..., 32:], before[..., 32:]), "what is not rotated is copied"


@pytest.mark.parametrize("rows", [0, 1, 2**40])
def test_the_reference_converts_the_rows_it_needs(rows):
    """No other row of a cache, which may be that of a long context, and may be empty."""
    cache = torch.tensor([[0.5, 0.25]]).expand(rows, 2)
    positions, query = torch.tensor([0, 2**40 - 1, 2**40]), torch.ones(3, 2)
    reference = apply_rope_with_cos_sin_cache_trace().reference
    out, _ = reference(positions, query, query, 2, cache)
    inside = positions < rows
    assert out[inside].tolist() == [[0.25, 0.75]] * int(inside.sum())
    assert out[~inside].isnan().all()


def test_slices_of_a_fused_projection_are_rotated_in_place(device):
    tokens, heads, head_dim = 6, (4, 2, 2), 64
    qkv = _heads(device, tokens, sum(heads) * head_dim, dtype=torch.bfloat16)
    before = qkv.clone()
    q, k, v = qkv.split([n * head_dim for n in heads], -1)
    positions = torch.arange(tokens, device=device)
    cache = _cache(tokens, head_dim, device)
    expected = rope.apply_rope_with_cos_sin_cache(
        positions, q.contiguous(), k.contiguous(), head_dim, cache
    )
    rope.apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_dim, cache)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
    assert torch.equal(v, before[:, -2 * head_dim :])


def test_in_place_and_out_of_place_agree_bit_for_bit(device):
    q, k = (_heads(device, 9, heads, 96, dtype=torch.float16) for heads in (5, 2))
    pos_ids = torch.arange(9, dtype=torch.int32, device=device) * 100
    for interleave in (False, True):
        expected = rope.apply_llama31_rope_pos_ids(q, k, pos_ids, 64, interleave)
        mine = q.clone(), k.clone()
        rope.apply_llama31_rope_pos_ids_inplace(*mine, pos_ids, 64, interleave)
        assert all(torch.equal(x, y) for x, y in zip(mine, expected, strict=True))


def test_quantised_values_saturate_and_keep_nan(device):
    q = torch.tensor([1e4, -1e4, 1.0, float("nan")], device=device).repeat(16).view(1, 1, 64)
    k, cache = q[:, 0].clone(), torch.tensor([[1.0] * 32 + [0.0] * 32], device=device)
    pos_ids = torch.zeros(1, dtype=torch.int32, device=device)
    out, *_ = rope.rope_quantize_fp8(q, k, None, None, cache, pos_ids, quant_scale_q=1.0)
    values = out.float()[0, 0, :4]
    assert values[:3].tolist() == [448.0, -448.0, 1.0] and values[3].isnan()


def test_without_nope_parts_results_have_no_columns(device):
    q, k = (_heads(device, 3, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    pos_ids = torch.arange(3, dtype=torch.int32, device=device)
    results = rope.rope_quantize_fp8(q, k, None, None, _cache(3, 64, device), pos_ids)
    assert [tuple(x.shape) for x in results] == [(3, 4, 64), (3, 2, 64), (3, 4, 0), (3, 2, 0)]
    assert {x.dtype for x in results} == {torch.float8_e4m3fn}
