"""Speculative sampling, and a million adversarial rows."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer
from flashinfer.testing import assert_matches_reference
from tests.sampling.test_sampling import random_logits, random_probs


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 40])
def test_chain_speculative_sampling(num_drafts, device):
    batch, vocab_size = 7, 517
    draft_probs = random_probs(batch * max(num_drafts, 1), vocab_size, device, 1.0)
    draft_probs = draft_probs[: batch * num_drafts].view(batch, num_drafts, vocab_size)
    target_probs = random_probs(batch * (num_drafts + 1), vocab_size, device, 1.0)
    target_probs = target_probs.view(batch, num_drafts + 1, vocab_size)
    target_probs[:3, :num_drafts] = draft_probs[:3]  # everything is accepted
    tokens = torch.randint(-1, vocab_size + 1, (batch, num_drafts), device=device).int()
    tokens[:3].clamp_(0, vocab_size - 1)
    outputs = assert_matches_reference(
        flashinfer.chain_speculative_sampling,
        draft_probs=draft_probs,
        draft_token_ids=tokens,
        target_probs=target_probs,
        seed=torch.arange(batch, device=device),
    )
    assert outputs["emitted"][:3].tolist() == [num_drafts] * 3


@pytest.mark.gpu
def test_speculative_tokens_are_the_target_models_own():
    batch, vocab_size = 400_000, 40
    device = torch.device("cuda")
    draft, target = (
        random_probs(1, vocab_size, device, 1.0),
        random_probs(2, vocab_size, device, 1.0),
    )
    tokens = flashinfer.sampling_from_probs(
        draft, indices=torch.zeros(batch, dtype=torch.int32, device=device), seed=3
    )
    emitted, _, _ = flashinfer.chain_speculative_sampling(
        draft.expand(batch, 1, -1).contiguous(),
        tokens.view(batch, 1),
        target.expand(batch, 2, -1).contiguous(),
        seed=4,
    )
    expected = target[0].double() * batch
    counts = emitted[:, 0].long().bincount(minlength=vocab_size)
    statistic = ((counts - expected).square() / expected).sum().item()
    assert statistic < vocab_size - 1 + 5 * math.sqrt(2 * (vocab_size - 1))


@pytest.mark.gpu
def test_a_million_adversarial_rows():
    """No hang, no illegal access, no token out of range."""
    device, vocab_size, rows = torch.device("cuda"), 1031, 62_500
    special = torch.tensor(
        [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 1e-38, 3e38, 1.0, -1.0], device=device
    )
    for _ in range(16):
        kind = torch.randint(0, 8, (rows, 1), device=device)
        logits = random_logits(rows, vocab_size, device, 10.0)
        spoilt = special[torch.randint(len(special), logits.shape, device=device)]
        one_hot = torch.where(logits == logits.amax(-1, keepdim=True), 1.0, 0.0)
        probs = torch.softmax(logits, -1)
        probs = torch.where(kind == 0, spoilt, probs)
        probs = torch.where(kind == 1, one_hot, probs)
        probs = torch.where(kind == 2, spoilt[:, :1], probs)
        probs = torch.where(kind == 3, (probs * 1e4).floor() * 1e-4, probs)
        probs = torch.where(kind == 4, probs * 1e-42, probs)
        k = torch.tensor([0, 1, 50, vocab_size, vocab_size + 9, -5, 500], device=device)
        k = k[torch.randint(len(k), (rows,), device=device)].int()
        p = torch.tensor([0.0, 1.0, 0.9, 1.5, -1.0, math.nan, 1e-9, 0.999999], device=device)
        p = p[torch.randint(len(p), (rows,), device=device)]
        for tokens in (
            flashinfer.sampling_from_probs(probs, seed=1),
            flashinfer.sampling_from_logits(probs, seed=1),
            flashinfer.top_p_sampling_from_probs(probs, p, seed=1),
            flashinfer.top_k_sampling_from_probs(probs, k, seed=1),
            flashinfer.min_p_sampling_from_probs(probs, p, seed=1),
            flashinfer.top_k_top_p_sampling_from_probs(probs, k, p, seed=1),
            flashinfer.top_k_top_p_sampling_from_logits(probs, k, p, seed=1),
        ):
            assert bool(((tokens >= 0) & (tokens < vocab_size)).all())
        flashinfer.top_p_renorm_probs(probs, p)
        flashinfer.top_k_renorm_probs(probs, k)
        flashinfer.top_k_mask_logits(probs, k)
        flashinfer.top_k(probs, 64)
    torch.cuda.synchronize()
