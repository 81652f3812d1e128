"""The sampling chain: temperature, top-k, top-p, min-p, a draw; each request with its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import kernels
from .copies import to_device

if TYPE_CHECKING:
    from .grammar import Grammar


MAX_LOGPROBS = 20
"""Most alternatives of which the probability is reported."""


@dataclass
class SamplingParams:
    """How a request's tokens are drawn, and when it ends.

    Attributes
    ----------
    temperature : float
        Divides the logits; 0: always the most probable token, the lowest id of equal ones.
    top_k : int
        How many of the most probable tokens are kept; 0 or -1: all.
    top_p : float
        Then: the most probable tokens that together have this probability, in (0, 1].
    min_p : float
        Then: tokens of at least this share of the largest probability, in [0, 1].
    seed : int, optional
        Equal seeds give equal random numbers, whatever else is served; with the engine's
        `batch_invariant` also equal tokens. None: a random one.
    max_tokens : int or None
        Tokens to generate, at least 1. None: as many as the model's positions and the KV cache
        have room for.
    stop_token_ids : sequence of int
        Further tokens that end the request, as end-of-text does; their text is left out.
    ignore_eos : bool
        Go on after end-of-text.
    repetition_penalty : float
        Divides the positive logits of tokens of the prompt or the answer, and multiplies the
        negative ones; above 0, 1: off.
    presence_penalty, frequency_penalty : float
        Subtracted from the logits of tokens of the answer: once, and once for each occurrence.
    logit_bias : mapping of int to float
        Added to the logits of these tokens, after the penalties.
    grammar : Grammar, optional
        What the answer must conform to: other tokens are never drawn.
    logprobs : int, optional
        Report the logarithm of each token's probability, and of so many of the most probable
        tokens; by the model's own logits, before all of the above. None: do not.
    prompt_logprobs : int, optional
        The same for the tokens of the prompt. Its pages are not taken from other requests then.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens before."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties)

    @property
    def adjusts(self) -> bool:
        """Whether the logits are changed before anything is drawn."""
        return bool(self.penalizes or self.logit_bias or self.grammar)

    def check(self) -> None:
        """Raise ValueError, naming the parameter, if one is out of its range."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"`temperature` must be finite and >= 0, got {self.temperature}")
        if type(self.top_k) is not int or not -1 <= self.top_k < 1 << 31:
            raise ValueError(f"`top_k` must be an int, 0 or -1 (all) or more, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"`min_p` must be in [0, 1], got {self.min_p}")
        seed = self.seed
        if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 63):
            raise ValueError(f"`seed` must be an int from 0 to 2^63 - 1, got {seed!r}")
        most = self.max_tokens
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"`max_tokens` must be an int of at least 1 or None, got {most!r}")
        self._check_adjustments()

    def _check_adjustments(self) -> None:
        repetition = self.repetition_penalty
        if not (math.isfinite(repetition) and repetition > 0):
            raise ValueError(f"`repetition_penalty` must be finite and > 0, got {repetition}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"`{name}` must be finite, got {getattr(self, name)}")
        for token, bias in self.logit_bias.items():
            if type(token) is not int or not math.isfinite(bias):
                raise ValueError(
                    f"`logit_bias` must map token ids to finite numbers, got {token!r}: {bias!r}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or not 0 <= count <= MAX_LOGPROBS):
                raise ValueError(
                    f"`{name}` must be an int from 0 to {MAX_LOGPROBS} or None, got {count!r}"
                )
        if self.grammar is not None and (self.ignore_eos or self.stop_token_ids):
            raise ValueError(
                "`grammar` must be None with `ignore_eos` or `stop_token_ids`: it decides the end"
            )


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    drawn: Sequence[int],
) -> torch.Tensor:
    """One token for each row; nothing waits for the device.

    Parameters
    ----------
    logits : torch.Tensor
        ``[rows, vocab]``, of 16 or 32 bits.
    params : sequence of SamplingParams
        One for each row.
    seeds, drawn : sequence of int
        Seed of each row's request, and how many tokens it has drawn: together, the key of the
        random numbers, which therefore do not depend on the batch.

    Returns
    -------
    torch.Tensor
        ``[rows]`` int32, or int64 where every row is greedy, on the device.
    """
    greedy = [p.temperature == 0 for p in params]
    best = None
    if any(greedy):
        # Not temperature 0, which draws among equal logits.
        lowest = kernels.TopKTieBreak.SMALL
        best = kernels.top_k(logits, 1, tie_break=lowest)[1][:, 0]
        if all(greedy):
            return best  # as they are: a cast is a kernel more between two steps

    column = partial(to_device, device=logits.device)
    temperature = column([p.temperature or 1.0 for p in params], torch.float32)
    probs = kernels.softmax(logits.float(), temperature)
    kept = [max(p.top_k, 0) for p in params]
    if any(kept):
        probs = kernels.top_k_renorm_probs(probs, column(kept, torch.int32))
    if any(p.top_p < 1 for p in params):
        top_p = column([p.top_p for p in params], torch.float32)
        probs = kernels.top_p_renorm_probs(probs, top_p)
    # A column of seeds: where a request is in the batch does not count.
    keys = {"seed": column(seeds, torch.int64)[:, None], "offset": column(drawn, torch.int64)}
    if any(p.min_p for p in params):
        min_p = column([p.min_p for p in params], torch.float32)
        tokens = kernels.min_p_sampling_from_probs(probs, min_p, **keys)
    else:
        tokens = kernels.sampling_from_probs(probs, **keys)
    if best is not None:
        tokens = torch.where(column(greedy, torch.bool), best.int(), tokens)
    return tokens


def steps(logits: torch.Tensor) -> Iterator[Callable[[], Any]]:
    """A call of each operation of `sample`, none of which needs another's result."""
    rows, device = len(logits), logits.device
    probs = torch.softmax(logits.float(), -1)
    share = torch.full((rows,), 0.5, device=device)
    kept = torch.ones(rows, dtype=torch.int32, device=device)
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    keys = {"seed": zeros[:, None], "offset": zeros}
    yield lambda: kernels.top_k(logits, 1, tie_break=kernels.TopKTieBreak.SMALL)
    # Adjusted ones.
    yield lambda: kernels.top_k(logits.float(), 1, tie_break=kernels.TopKTieBreak.SMALL)
    yield lambda: kernels.softmax(logits.float(), share)
    yield lambda: kernels.top_k_renorm_probs(probs, kept)
    yield lambda: kernels.top_p_renorm_probs(probs, share)
    yield lambda: kernels.sampling_from_probs(probs, **keys)
    yield lambda: kernels.min_p_sampling_from_probs(probs, share, **keys)
