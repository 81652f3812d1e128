"""Logarithms of the probabilities that a model gives to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import kernels


class TokenLogprob(NamedTuple):
    """Scores of one token and of those that were more probable, or nearly as much.

    Attributes
    ----------
    token_id : int
        The token.
    logprob : float
        Natural logarithm of its probability.
    top : list of (int, float)
        The most probable tokens with theirs, the most probable first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class LogprobTensors:
    """What `read` needs, on its way to the host."""

    own: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor

    @staticmethod
    def of(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> LogprobTensors:
        """Take them from logits; nothing waits for the device.

        Parameters
        ----------
        logits : torch.Tensor
            ``[rows, vocab]``, of 16 or 32 bits.
        tokens : torch.Tensor
            ``[rows]``, a token of each row.
        count : int
            Most probable tokens to tell of each row; 0: none.
        """
        total = torch.logsumexp(logits.float(), dim=1, keepdim=True)
        own = logits.gather(1, tokens.long()[:, None]) - total
        if count:
            top, ids = kernels.top_k(
                logits, count, sorted=True, tie_break=kernels.TopKTieBreak.SMALL
            )
        else:
            top, ids = logits[:, :0], tokens.long()[:, None][:, :0]
        parts = (own[:, 0], top - total, ids)
        return LogprobTensors(*(part.to("cpu", non_blocking=True) for part in parts))

    def read(self, row: int, token: int, count: int) -> TokenLogprob:
        """Of one row, when the copies have arrived; the `count` most probable."""
        values, ids = self.top[row, :count].tolist(), self.top_ids[row, :count].tolist()
        return TokenLogprob(token, float(self.own[row]), list(zip(ids, values, strict=True)))


class PromptLogprobs:
    """Scores of a prompt's tokens, collected while the prompt is computed.

    Parameters
    ----------
    prompt : sequence of int
        Token ids.
    count : int
        Most probable tokens to tell of each position.

    Attributes
    ----------
    entries : list of TokenLogprob or None
        So far. None for the first token: nothing is before it.
    """

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self._prompt, self._count = prompt, count
        self.entries: list[TokenLogprob | None] = [None]

    @property
    def complete(self) -> bool:
        """Whether all of them are there."""
        return len(self.entries) == len(self._prompt)

    def take(self, position: int, logits: torch.Tensor) -> None:
        """Logits after the prompt's tokens from `position` on; waits for the device."""
        known = len(self.entries)
        tokens = self._prompt[known : position + len(logits) + 1]
        if not tokens:
            return  # of a part that is computed again
        rows = logits[known - 1 - position :][: len(tokens)]
        own = torch.tensor(tokens, device=logits.device)
        tensors = LogprobTensors.of(rows, own, self._count)
        if logits.is_cuda:
            torch.cuda.current_stream().synchronize()
        self.entries += [tensors.read(i, t, self._count) for i, t in enumerate(tokens)]
