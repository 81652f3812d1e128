"""Logits so large, or temperatures so small, that their product has no digit left of a fraction."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer

DRAWS = {
    "plain": lambda logits, **more: flashinfer.sampling_from_logits(logits, **more),
    "both": lambda logits, **more: flashinfer.top_k_top_p_sampling_from_logits(
        logits, 40, 0.9, **more
    ),
    "joint": lambda logits, **more: flashinfer.top_k_top_p_sampling_from_logits(
        logits, 40, 0.9, filter_apply_order="joint", **more
    ),
    "top_p": lambda logits, **more: flashinfer.top_k_top_p_sampling_from_logits(
        logits, 0, 0.9, **more
    ),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
EXTREMES = [1e7, -1e9, 1.3e20, -1e30, 3e38]


def _rows_with_close_maxima(rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Normal logits; the two largest, of different tiles, are neighbours in float32."""
    logits = torch.randn(rows, vocab_size, device=device) * 3
    largest = logits.amax(-1)
    logits[:, 0] = torch.nextafter(largest, torch.full_like(largest, -math.inf))
    return logits


@pytest.mark.parametrize("vocab_size", [2, 9000, 140000])
@pytest.mark.parametrize("temperature", [1e-3, 1e-7, 1e-8, 1e-10, 1e-38])
def test_softmax_at_small_temperatures(temperature, vocab_size, device):
    logits = _rows_with_close_maxima(8, vocab_size, device)
    temperature = float(torch.tensor(temperature, dtype=torch.float32))
    wanted = torch.softmax(logits.double() / temperature, -1)
    got = flashinfer.softmax(logits, temperature)
    torch.testing.assert_close(got.double(), wanted, rtol=5e-5, atol=1e-30)
    tensor = torch.full((8,), temperature, device=device)
    assert torch.equal(flashinfer.softmax(logits, tensor), got)


@pytest.mark.parametrize("vocab_size", [5, 20000, 140000])
def test_softmax_at_infinite_temperature(vocab_size, device):
    logits = torch.randn(4, vocab_size, device=device)
    logits[:, 1] = -math.inf
    got = flashinfer.softmax(logits, torch.full((4,), math.inf, device=device))
    wanted = torch.full_like(got, 1 / (vocab_size - 1))
    wanted[:, 1] = 0
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("extreme", EXTREMES)
def test_softmax_of_large_logits(extreme, device):
    logits = torch.full((6, 9000), extreme, device=device)
    logits[3:] = _rows_with_close_maxima(3, 9000, device) + extreme
    got = flashinfer.softmax(logits)
    wanted = torch.softmax(logits.double(), -1)
    torch.testing.assert_close(got.double(), wanted, rtol=5e-5, atol=1e-30)


@pytest.mark.parametrize("extreme", EXTREMES)
@each_draw
def test_draws_from_equal_large_logits(draw, extreme, device):
    """A mask of large numbers leaves a row without any token."""
    logits = torch.full((24, 9000), extreme, device=device)
    tokens = draw(logits, seed=3)
    assert bool(((tokens >= 0) & (tokens < 9000)).all())
    assert len(set(tokens.tolist())) > 16
    logits[:, 8191] = torch.nextafter(logits[0, 0], torch.tensor(math.inf, device=device))
    logits[:, 8191] += abs(extreme) / 1e3
    assert draw(logits, seed=3).tolist() == [8191] * 24


@pytest.mark.gpu
@each_draw
def test_neighbours_in_float32_keep_their_odds(draw):
    """The two are a difference of 1 apart, which is the last bit of each."""
    logits = torch.full((1, 5000), -math.inf, device="cuda")
    logits[0, 70], logits[0, 4900] = 2.0**23 + 1, 2.0**23
    row = torch.zeros(100_000, dtype=torch.int32, device="cuda")
    tokens = draw(logits, indices=row, seed=5)
    assert set(tokens.tolist()) == {70, 4900}
    odds = 1 / (1 + math.exp(-1))
    share = float((tokens == 70).double().mean())
    assert abs(share - odds) < 4.5 * math.sqrt(odds * (1 - odds) / 100_000)
