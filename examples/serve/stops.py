"""Finds the texts that end an answer, in text that comes in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _Pattern:
    """One text, matched by the algorithm of D. Knuth, J. Morris and V. Pratt, 1977.

    The table is computed as far as the text has been matched, so that a long text that never
    occurs costs nothing.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of `text` that the input ends with
        # borders[n]: length of the longest proper prefix of text[:n] that it also ends with.
        self._borders = [0, 0]

    def push(self, character: str) -> bool:
        """Whether the input ends with the text after one more character."""
        length = self.matched
        while length and self.text[length] != character:
            length = self._border(length)
        self.matched = length + (self.text[length] == character)
        return self.matched == len(self.text)

    def _border(self, length: int) -> int:
        borders = self._borders
        while len(borders) <= length:
            character, border = self.text[len(borders) - 1], borders[-1]
            while border and self.text[border] != character:
                border = borders[border]
            borders.append(border + (self.text[border] == character))
        return borders[length]


class StopText:
    """Finds the first of some texts in text that comes in pieces.

    The first is the one that is complete first; of several that end together, the longest. The
    result does not depend on where the text is cut. A character costs the same work on average,
    however long the texts are.

    Parameters
    ----------
    stops : sequence of str
        The texts, none empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._patterns = [_Pattern(text) for text in stops]
        self._held: deque[str] = deque()  # may be the beginning of one of them

    def push(self, piece: str, *, last: bool) -> tuple[str, bool]:
        """Text that another piece completes, and whether a stop has been found after it."""
        if not self._patterns:
            return piece, False
        for character in piece:
            self._held.append(character)
            # All of them: each has to see every character.
            ended = [p for p in self._patterns if p.push(character)]
            if ended:
                return self._show(max(len(p.text) for p in ended)), True
        return self._show(0 if last else max(p.matched for p in self._patterns)), False

    def _show(self, hold: int) -> str:
        """All that is held but the last `hold` characters."""
        return "".join(self._held.popleft() for _ in range(len(self._held) - hold))
