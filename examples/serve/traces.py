"""Arrival traces: when requests come and how long they are.

The distributions of prompt lengths are those of the evaluation in FlashInfer's paper
(arXiv 2501.01005): constant, uniform and skewed (Zipf) lengths, and the synthetic serving load with
lengths from U(512, 2048).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LENGTHS = ("constant", "uniform", "skewed", "sharegpt")
MEAN = 1024
LONGEST = 16384  # of the skewed lengths


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Attributes
    ----------
    time : float
        Seconds after the start of the trace.
    prompt_tokens, output_tokens : int
        Lengths, at least 1.
    cancel_after : int or None
        Tokens after which the client leaves; None: it stays to the end.
    """

    time: float
    prompt_tokens: int
    output_tokens: int
    cancel_after: int | None = None


def zipf_probabilities(mean: float = MEAN, longest: int = LONGEST) -> np.ndarray:
    """Probabilities of the lengths 1 to `longest`, a power law with the given mean.

    Parameters
    ----------
    mean : float
        Wanted mean, between the mean for an exponent of 8 and `(longest + 1) / 2`.
    longest : int
        Largest length.

    Returns
    -------
    numpy.ndarray
        `(longest,)` float64; entry `i` is the probability of the length `i + 1`.
    """
    logs = np.log(np.arange(1, longest + 1))

    def law(exponent: float) -> np.ndarray:
        weights = np.exp(-exponent * logs)
        return weights / weights.sum()

    def mean_of(exponent: float) -> float:
        return float(law(exponent) @ np.arange(1, longest + 1))

    low, high = 0.0, 8.0
    if not mean_of(high) < mean < mean_of(low):
        raise ValueError(f"mean must be in ({mean_of(high):.3g}, {mean_of(low):.6g}), got {mean}")
    for _ in range(60):  # the mean falls with the exponent: bisection
        middle = (low + high) / 2
        low, high = (middle, high) if mean_of(middle) > mean else (low, middle)
    return law(low)


def _prompt_lengths(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    if kind == "constant":
        return np.full(count, MEAN)
    if kind == "uniform":
        return rng.integers(512, 1024, size=count, endpoint=True)
    if kind == "skewed":
        return rng.choice(np.arange(1, LONGEST + 1), size=count, p=zipf_probabilities())
    if kind == "sharegpt":
        return rng.integers(512, 2048, size=count, endpoint=True)
    raise ValueError(f"lengths must be one of {', '.join(LENGTHS)}, got {kind!r}")


def make_trace(
    lengths: str,
    num_requests: int,
    *,
    rate: float = math.inf,
    output_tokens: int = 128,
    scale: float = 1.0,
    cancel_share: float = 0.0,
    seed: int = 0,
) -> list[Arrival]:
    """Trace of requests with Poisson arrivals.

    Lengths, arrivals and cancellations have random streams of their own: the requests of a seed are
    the same at every rate.

    Parameters
    ----------
    lengths : str
        Prompt lengths: "constant" (1024), "uniform" (512 to 1024), "skewed" (Zipf up to 16384, mean
        1024) or "sharegpt" (512 to 2048).
    num_requests : int
        Number of requests, at least 1.
    rate : float
        Mean requests per second, above 0; infinite: all come at once, at time 0.
    output_tokens : int
        Tokens that each request generates, at least 1.
    scale : float
        Factor of the prompt lengths, above 0, for small models; no length falls below 1.
    cancel_share : float
        Probability, 0 to 1, that a client leaves before its last token.
    seed : int
        Seed, at least 0.

    Returns
    -------
    list of Arrival
        In the order of `time`, the first at 0.

    Raises
    ------
    ValueError
        For values that are not allowed.
    """
    if num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, got {num_requests}")
    if output_tokens < 1:
        raise ValueError(f"output_tokens must be at least 1, got {output_tokens}")
    if not rate > 0:
        raise ValueError(f"rate must be above 0, got {rate}")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be above 0 and finite, got {scale}")
    if not 0 <= cancel_share <= 1:
        raise ValueError(f"cancel_share must be between 0 and 1, got {cancel_share}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    of_lengths, of_times, of_leaving = (np.random.default_rng([seed, i]) for i in range(3))
    prompts = _prompt_lengths(lengths, num_requests, of_lengths)
    prompts = np.maximum(1, np.rint(prompts * scale)).astype(int)
    gaps = np.zeros(num_requests)
    if math.isfinite(rate):
        gaps[1:] = of_times.exponential(1 / rate, size=num_requests - 1)
    leaves = of_leaving.random(num_requests) < cancel_share
    after = of_leaving.integers(0, output_tokens, size=num_requests)
    return [
        Arrival(float(time), int(prompt), output_tokens, int(tokens) if gone else None)
        for time, prompt, gone, tokens in zip(np.cumsum(gaps), prompts, leaves, after, strict=True)
    ]
