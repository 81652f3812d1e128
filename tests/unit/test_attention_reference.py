"""The attention reference against PyTorch's own attention, and against what its options promise."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from flashinfer.trace.templates.attention_reference import (
    _alibi_slopes,
    _paged_attention_reference,
    _ragged_attention_reference,
    _rotate,
    _single_attention_reference,
)

QO, KV, HEADS, KV_HEADS, DIM = 5, 9, 6, 2, 32
SCALE = 0.3


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, KV, KV_HEADS, DIM, dtype=torch.float64)
    return torch.randn(QO, HEADS, DIM, dtype=torch.float64), k, v


def _pytorch(q, k, v, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None):
    """[tokens, heads, dim], with a bool mask [q, k] or a bias of the logits [heads, q, k]."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    chosen = mask if bias is None else bias[None]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=chosen, scale=SCALE)
    return out[0].transpose(0, 1)


def _logits(q, k) -> torch.Tensor:
    return torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // KV_HEADS, 1)) * SCALE


def test_plain_attention_and_its_lse(tensors):
    q, k, v = tensors
    o, lse = _single_attention_reference(q, k, v, SCALE)
    torch.testing.assert_close(o, _pytorch(q, k, v))
    torch.testing.assert_close(lse, _logits(q, k).logsumexp(-1).T / math.log(2))


@pytest.mark.parametrize("window", [-1, 0, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_causal_and_window_are_aligned_to_the_end(causal, window, tensors):
    position, key = torch.arange(QO)[:, None] + KV - QO, torch.arange(KV)
    mask = torch.ones(QO, KV, dtype=torch.bool)
    if causal:
        mask &= key <= position
    if window >= 0:
        mask &= key >= position - window
    o, _ = _single_attention_reference(*tensors, SCALE, causal=causal, window_left=window)
    torch.testing.assert_close(o, _pytorch(*tensors, mask))


def test_a_custom_mask_takes_the_place_of_causal_but_not_of_the_window(tensors):
    mask = torch.rand(QO, KV) > 0.4
    mask[:, -1] = True
    options = {"causal": True, "custom_mask": mask}
    o, _ = _single_attention_reference(*tensors, SCALE, **options)
    torch.testing.assert_close(o, _pytorch(*tensors, mask))
    near = torch.arange(KV) >= torch.arange(QO)[:, None] + KV - QO - 3
    o, _ = _single_attention_reference(*tensors, SCALE, window_left=3, **options)
    torch.testing.assert_close(o, _pytorch(*tensors, mask & near))


def test_alibi(tensors):
    q, k, v = tensors
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3], dtype=torch.float64)
    torch.testing.assert_close(_alibi_slopes(HEADS, q.device), slopes)
    distance = torch.arange(KV)[None] - (torch.arange(QO)[:, None] + KV - QO)
    bias = slopes[:, None, None] * distance
    o, _ = _single_attention_reference(q, k, v, SCALE, pos_encoding_mode="ALIBI")
    torch.testing.assert_close(o, _pytorch(q, k, v, bias=bias))


def test_rotation_makes_logits_depend_on_distances():
    x, y = torch.randn(2, 1, 1, DIM, dtype=torch.float64)
    near, far = (
        (_rotate(x, torch.tensor([p]), 2.0, 1e4) * _rotate(y, torch.tensor([p + 7]), 2.0, 1e4))
        for p in (3, 4000)
    )
    torch.testing.assert_close(near.sum(), far.sum())
    angle = 3 / 2.0
    expected = x[..., 0] * math.cos(angle) - x[..., DIM // 2] * math.sin(angle)
    torch.testing.assert_close(_rotate(x, torch.tensor([3]), 2.0, 1e4)[..., 0], expected)


def test_soft_cap_and_sinks(tensors):
    q, k, v = tensors
    sinks = torch.randn(HEADS, dtype=torch.float64)
    o, lse = _single_attention_reference(q, k, v, SCALE, logits_soft_cap=2.0, sinks=sinks)
    logits = 2 * torch.tanh(_logits(q, k) / 2)
    total = logits.exp().sum(-1) + sinks.exp()[:, None]
    values = v.repeat_interleave(HEADS // KV_HEADS, 1)
    expected = torch.einsum("hqk,khd->qhd", logits.exp() / total[..., None], values)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(lse, total.log2().T)


def test_a_query_that_sees_nothing(tensors):
    q, k, v = tensors
    o, lse = _single_attention_reference(q, k[:3], v[:3], SCALE, causal=True)
    assert o[:2].eq(0).all() and lse[:2].eq(float("-inf")).all() and lse[2:].isfinite().all()
    sinks = torch.ones(HEADS)
    o, lse = _single_attention_reference(q, k[:0], v[:0], SCALE, sinks=sinks)
    assert o.eq(0).all()
    torch.testing.assert_close(lse, torch.full_like(lse, 1 / math.log(2)))


def test_pages_in_any_order_are_rows(tensors):
    q, k, v = tensors
    caches = torch.full((2, 7, 4, KV_HEADS, DIM), float("nan"), dtype=torch.float64)
    pages = torch.tensor([6, 0, 3], dtype=torch.int32)
    for cache, rows in zip(caches, (k, v), strict=True):
        for token in range(KV):
            cache[pages[token // 4], token % 4] = rows[token]
    starts, last = torch.tensor([0, 0, 3]), torch.tensor([0, 1])
    indptr = torch.tensor([0, 2, 2 + QO])
    queries = torch.cat([q[:2], q])
    paged = (queries, *caches, starts, pages, last, SCALE, indptr)
    o, lse = _paged_attention_reference(*paged, causal=True)
    ragged = (queries, k, v, indptr, torch.tensor([0, 0, KV]), SCALE)
    torch.testing.assert_close((o, lse), _ragged_attention_reference(*ragged, causal=True))
    assert o[:2].eq(0).all()
    natural = _paged_attention_reference(*paged, causal=True, lse_base="ln", lse_layout="HN")[1]
    torch.testing.assert_close(natural, lse.T * math.log(2))


def test_items_are_scored_as_if_alone():
    """In <prefix> | item | item |, an item's queries see what they see right after the prefix."""
    prefix, items = 4, (3, 2)
    places = [0, 1, 2, 3, 0, 1, 2, 0]
    total = prefix + len(places)
    q = torch.randn(total, HEADS, DIM, dtype=torch.float64)
    k, v = torch.randn(2, total, KV_HEADS, DIM, dtype=torch.float64)
    bounds = torch.tensor([0, total])
    o, _ = _ragged_attention_reference(
        *(q, k, v, bounds, bounds, SCALE),
        prefix_len_ptr=torch.tensor([prefix]),
        token_pos_in_items_ptr=torch.tensor([places]),
    )
    alone, _ = _single_attention_reference(q[:prefix], k[:prefix], v[:prefix], SCALE, causal=True)
    torch.testing.assert_close(o[:prefix], alone)
    begin = prefix + 1
    for length in items:
        rows = [*range(prefix), *range(begin, begin + length)]
        alone, _ = _single_attention_reference(q[rows], k[rows], v[rows], SCALE, causal=True)
        torch.testing.assert_close(o[begin : begin + length], alone[prefix:])
        delimiter, _ = _single_attention_reference(
            q[begin - 1 : begin], k[:prefix], v[:prefix], SCALE
        )
        torch.testing.assert_close(o[begin - 1 : begin], delimiter)
        begin += length + 1
