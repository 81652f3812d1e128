"""Changes that requests ask for of their logits: penalties, biases, the mask of a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .copies import to_device
from .grammar import Matcher
from .sampling import SamplingParams


class Adjustment:
    """Changes the logits of one request; what it depends on is on the device.

    Parameters
    ----------
    params : SamplingParams
        The requested changes.
    prompt : sequence of int
        Token ids: the repetition penalty counts these too.
    vocabulary : int
        Logits of a token.
    device : torch.device
        Device of the logits.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], vocabulary: int, device: torch.device
    ) -> None:
        self.params = params
        self.matcher: Matcher | None = params.grammar.start() if params.grammar else None
        self.counts = self.in_prompt = None
        if params.penalizes:
            self.counts = torch.zeros(vocabulary, dtype=torch.int32, device=device)
            self.in_prompt = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self.in_prompt[torch.tensor(prompt, device=device)] = True
        ids = list(params.logit_bias)
        self.biased = torch.tensor(ids, dtype=torch.int64, device=device)
        self.biases = torch.tensor(
            [float(params.logit_bias[token]) for token in ids], dtype=torch.float32, device=device
        )

    def count(self, token: torch.Tensor) -> None:
        """Take note of a token that has been drawn: one element, on the device."""
        if self.counts is not None:
            self.counts[token.long()] += 1


def adjust(logits: torch.Tensor, adjustments: Sequence[Adjustment | None]) -> torch.Tensor:
    """Logits as the requests want them.

    Parameters
    ----------
    logits : torch.Tensor
        ``[rows, vocab]``, of 16 or 32 bits; left as they are.
    adjustments : sequence of Adjustment or None
        One for each row.

    Returns
    -------
    torch.Tensor
        ``[rows, vocab]``, float32 if anything is changed: penalties first, then biases, then the
        grammars' masks. Nothing waits for the device.
    """
    if not any(adjustments):
        return logits
    logits = logits.to(torch.float32, copy=True)

    def chosen(
        wanted: Callable[[Adjustment], object],
    ) -> tuple[torch.Tensor, list[Adjustment]] | None:
        """The rows whose adjustment is wanted, on the device, and these adjustments."""
        found = [(row, a) for row, a in enumerate(adjustments) if a is not None and wanted(a)]
        if not found:
            return None
        rows = to_device([row for row, _ in found], torch.int64, logits.device)
        return rows, [adjustment for _, adjustment in found]

    if picked := chosen(lambda a: a.counts is not None):
        rows, having = picked
        logits[rows] = _penalized(logits[rows], having)
    if picked := chosen(lambda a: len(a.biased)):
        rows, having = picked
        counts = [len(a.biased) for a in having]
        repeats = to_device(counts, torch.int64, logits.device)
        each = rows.repeat_interleave(repeats, output_size=sum(counts))  # without waiting for it
        where = (each, torch.cat([a.biased for a in having]))
        logits.index_put_(where, torch.cat([a.biases for a in having]), accumulate=True)
    if picked := chosen(lambda a: a.matcher is not None):
        rows, having = picked
        words = torch.stack([a.matcher.allowed() for a in having if a.matcher is not None])
        words = words.pin_memory() if logits.is_cuda else words
        allowed = unpacked(words.to(logits.device, non_blocking=True), logits.shape[1])
        logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))
    return logits


def _penalized(logits: torch.Tensor, having: Sequence[Adjustment]) -> torch.Tensor:
    def column(values: Sequence[float]) -> torch.Tensor:
        return to_device(values, torch.float32, logits.device)[:, None]

    counts = torch.stack([a.counts for a in having if a.counts is not None])
    in_prompt = torch.stack([a.in_prompt for a in having if a.in_prompt is not None])
    repetition = column([a.params.repetition_penalty for a in having])
    seen = in_prompt | (counts > 0)
    logits = torch.where(
        seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits
    )
    logits = logits - column([a.params.frequency_penalty for a in having]) * counts
    return logits - column([a.params.presence_penalty for a in having]) * (counts > 0)


def unpacked(words: torch.Tensor, size: int) -> torch.Tensor:
    """Bits as booleans, the first in the lowest bit: the inverse of ``packbits(..., "little")``.

    Parameters
    ----------
    words : torch.Tensor
        ``[rows, bytes]`` uint8.
    size : int
        Bits of a row to return; those that `words` lacks are False.

    Returns
    -------
    torch.Tensor
        ``[rows, size]`` bool.
    """
    bit = torch.arange(8, dtype=torch.uint8, device=words.device)
    bits = ((words[:, :, None] >> bit) & 1).bool().flatten(1)
    return torch.nn.functional.pad(bits[:, :size], (0, max(0, size - bits.shape[1])))
