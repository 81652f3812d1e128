"""Guesses at the next tokens of a text, from what followed the same few tokens in it before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .scheduler import Scheduled, Scheduler
    from .state import RequestState


class NgramIndex:
    """Where each run of tokens has last occurred in a text that grows.

    The method is known as prompt lookup decoding, or n-gram speculation. A new token costs the
    same however long the text is.

    Parameters
    ----------
    size : int
        Tokens of a run, at least 1.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._next_of: dict[tuple[int, ...], int] = {}  # run: position of what followed it last
        self._indexed = size

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow.

        Parameters
        ----------
        tokens : sequence of int
            The text, which begins as that of the last call.
        count : int
            Most tokens to propose.
        """
        size = self._size
        for position in range(self._indexed, len(tokens)):
            self._next_of[tuple(tokens[position - size : position])] = position
        self._indexed = max(self._indexed, len(tokens))
        start = self._next_of.get(tuple(tokens[-size:]))
        return [] if start is None else list(tokens[start : start + count])


class Speculator:
    """Adds guesses to the steps of a scheduler.

    A token is drawn after each guess as it would be without them: from the same logits, by the same
    random numbers. The first that differs from its guess ends what the step gives, so that answers
    are those without guesses, as far as logits of several tokens at a time round alike.

    Parameters
    ----------
    most : int
        Guesses for a request in a step, at least 1.
    ngram : int
        Tokens that must have occurred before, at least 1.
    """

    def __init__(self, most: int, ngram: int) -> None:
        for name, value in (("speculation", most), ("ngram", ngram)):
            if type(value) is not int or value < 1:
                raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}")
        self._most, self._ngram = most, ngram
        self.proposed = self.accepted = 0

    def extend(self, scheduled: Scheduled, scheduler: Scheduler) -> Scheduled:
        """Chunks with guesses after their tokens, as far as the step's size and pages allow."""
        budget = scheduler.max_batch_tokens - sum(len(chunk.tokens) for _, chunk in scheduled)
        extended = []
        for request, chunk in scheduled:
            draft = []
            if chunk.start + len(chunk.tokens) == len(request.tokens):
                draft = self._draft(request, budget, scheduler)
            if draft:
                budget -= len(draft)
                chunk = replace(chunk, tokens=[*chunk.tokens, *draft], drafts=len(draft))
            extended.append((request, chunk))
        return extended

    def _draft(self, request: RequestState, budget: int, scheduler: Scheduler) -> list[int]:
        if request.params.penalizes or request.params.grammar is not None:
            return []  # its logits depend on the tokens before, drawn ones included
        # The last token of a request needs no guess.
        most = min(self._most, budget, request.max_tokens - request.drawn - 1)
        if most < 1:
            return []
        if request.ngrams is None:
            request.ngrams = NgramIndex(self._ngram)
        draft = request.ngrams.propose(request.tokens, most)
        length = len(request.tokens) + len(draft)
        return draft if draft and scheduler.reserve(request, length) else []
