"""The short causal convolution in front of a recurrence, over the next tokens of each sequence.

It is made of PyTorch's operations, and nothing of it waits for the device. A slot of the cache
holds the last inputs of a sequence: the `width - 1` that its next token needs and, for a draft of
T tokens, T - 1 more after them, which may turn out not to count.

    before    [ . h1 h2 h3 . ]     num_accepted - 1 inputs lie in front of the history
    after     [ h2 h3 x1 x2 x3 ]   the new inputs; those that count are known at the next call
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .pools import write_rows


class History(NamedTuple):
    """The inputs before the tokens of a call.

    Attributes
    ----------
    cache : torch.Tensor
        ``[slots, channels, length]``, overwritten.
    slots : torch.Tensor
        ``[sequences]``: the slot of each sequence.
    live : torch.Tensor
        ``[sequences]`` bool; the others are padding, which leaves the cache as it is.
    starts : torch.Tensor
        ``[sequences + 1]``: where sequences begin in the packed tokens.
    skipped : torch.Tensor
        ``[sequences]`` int64: inputs in front of the history.
    """

    cache: torch.Tensor
    slots: torch.Tensor
    live: torch.Tensor
    starts: torch.Tensor
    skipped: torch.Tensor

    def places(self) -> torch.Tensor:
        """The slots, those that the cache has not somewhere in it."""
        return self.slots.long().clamp(0, len(self.cache) - 1)

    def owners(self, tokens: torch.Tensor) -> torch.Tensor:
        """The sequence of each packed token; of a token that has none, any."""
        found = torch.searchsorted(self.starts, tokens.to(self.starts.dtype), right=True) - 1
        return found.clamp(0, len(self.slots) - 1)


def convolve(
    x: torch.Tensor, taps: torch.Tensor, history: History, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, Callable[[], None]]:
    """SiLU of the convolution, float32 ``[tokens, channels]``, and what moves the cache on.

    The caller calls that when nothing can refuse the call any more. `x` is ``[tokens, channels]``
    and `taps` ``[channels, width]``, that of the token itself last.
    """
    width, length = taps.shape[1], history.cache.shape[2]
    result = x.new_zeros(x.shape, dtype=torch.float32)
    if x.shape[0] == 0 or len(history.slots) == 0:
        return result, lambda: None
    tokens = torch.arange(len(x), device=x.device)
    owners = history.owners(tokens)
    step = tokens - history.starts[owners]
    slots, skipped = history.places()[owners], history.skipped[owners]
    for tap in range(width):
        back = width - 1 - tap
        column = (skipped + step + tap).clamp(0, length - 1)
        past = history.cache[slots, :, column]
        present = x[(tokens - back).clamp(min=0)]
        inside = (step >= back)[:, None]
        result += torch.where(inside, present, past).float() * taps[:, tap].float()
    rows, live = _next_inputs(x, width - 1, history)
    move_on = functools.partial(write_rows, history.cache, history.slots, rows, live)
    return F.silu(result if bias is None else result + bias.float()), move_on


def _next_inputs(x: torch.Tensor, kept: int, history: History) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache's next rows, and the sequences that have new ones.

    The last ``kept - 1`` inputs of the history are in front of the new ones.
    """
    length, first = history.cache.shape[2], history.starts[:-1, None]
    counts = history.starts.diff()[:, None]
    column = torch.arange(length, device=x.device)
    old = history.cache[history.places()]
    moved = (history.skipped[:, None] + 1 + column).clamp(max=length - 1)
    source = torch.where(column < kept - 1, moved, column)
    past = old.gather(2, source[:, None].expand_as(old))
    row = column - (kept - 1)
    present = x[(first + row).clamp(0, len(x) - 1)].transpose(1, 2)
    is_new = (row >= 0) & (row < counts)
    rows = torch.where(is_new[:, None], present, past)
    return rows, history.live & (counts[:, 0] > 0)
