"""Arrival traces: distributions, rates, seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from examples.serve.traces import LENGTHS, make_trace, zipf_probabilities


@pytest.mark.parametrize(
    "kind, low, high, mean",
    [("constant", 1024, 1024, 1024), ("uniform", 512, 1024, 768), ("sharegpt", 512, 2048, 1280)],
)
def test_lengths_cover_their_range(kind: str, low: int, high: int, mean: float):
    prompts = np.array([a.prompt_tokens for a in make_trace(kind, 20000)])
    assert (prompts.min(), prompts.max()) == (low, high)
    # Five standard errors of a uniform distribution.
    assert abs(prompts.mean() - mean) <= 5 * (high - low) / math.sqrt(12 * len(prompts))


def test_skewed_lengths_are_a_power_law_with_the_mean():
    law = zipf_probabilities()
    sizes = np.arange(1, len(law) + 1)
    assert law.sum() == pytest.approx(1) and law @ sizes == pytest.approx(1024)
    slopes = np.diff(np.log(law)) / np.diff(np.log(sizes))
    assert np.allclose(slopes, slopes[0]) and slopes[0] < 0
    prompts = np.array([a.prompt_tokens for a in make_trace("skewed", 20000)])
    error = math.sqrt((law @ sizes**2 - 1024**2) / len(prompts))
    assert abs(prompts.mean() - 1024) < 5 * error
    assert np.median(prompts) < 512 and prompts.max() > 8192


def test_poisson_arrivals_have_the_rate():
    trace = make_trace("constant", 20000, rate=50)
    gaps = np.diff([a.time for a in trace])
    assert trace[0].time == 0 and gaps.min() >= 0
    # Of an exponential distribution, mean and deviation are 1 / rate.
    assert gaps.mean() == pytest.approx(0.02, rel=5 / math.sqrt(len(gaps)))
    assert gaps.std() == pytest.approx(0.02, rel=0.05)
    assert {a.time for a in make_trace("constant", 9)} == {0.0}


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_seed_fixes_the_requests_at_every_rate(kind: str):
    slow, fast = (make_trace(kind, 50, rate=r, cancel_share=0.5, seed=3) for r in (1, 8))
    assert slow == make_trace(kind, 50, rate=1, cancel_share=0.5, seed=3)
    assert [(a.prompt_tokens, a.cancel_after) for a in slow] == [
        (a.prompt_tokens, a.cancel_after) for a in fast
    ]
    assert slow != make_trace(kind, 50, rate=1, cancel_share=0.5, seed=4)


def test_scale_and_cancellations():
    small = make_trace("skewed", 500, scale=0.01, output_tokens=7, cancel_share=0.25)
    assert min(a.prompt_tokens for a in small) == 1
    assert max(a.prompt_tokens for a in small) <= 164
    leaving = [a.cancel_after for a in small if a.cancel_after is not None]
    assert set(leaving) == set(range(7)) and 75 < len(leaving) < 175
    assert all(a.cancel_after is None for a in make_trace("skewed", 100))


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": "normal"},
        {"num_requests": 0},
        {"rate": 0.0},
        {"rate": math.nan},
        {"output_tokens": 0},
        {"scale": 0.0},
        {"scale": math.inf},
        {"cancel_share": 1.5},
        {"seed": -1},
    ],
)
def test_refusals_name_the_argument(change: dict):
    (name,) = change
    with pytest.raises(ValueError, match=name):
        make_trace(**{"lengths": "constant", "num_requests": 1} | change)


def test_a_mean_out_of_reach_is_refused():
    with pytest.raises(ValueError, match="mean must be"):
        zipf_probabilities(mean=900, longest=1000)
