"""Texts that end an answer, against a search of the whole text."""

from __future__ import annotations

import random
import time

import pytest

from examples.serve.stops import StopText


def _expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop that is complete first, the longest of these."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def _held(text: str, stops: list[str]) -> int:
    """Characters at the end of a text that a stop may begin with."""
    return max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))


def _pieces(rng: random.Random, text: str) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("alphabet", ["a", "ab", "abcé🙂"])
def test_random_texts(alphabet: str):
    rng = random.Random(alphabet)
    hits = 0
    for _ in range(1500):
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 40)))
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 9))) for _ in range(3)]
        filter_, shown, stopped, seen = StopText(stops), "", False, ""
        pieces = _pieces(rng, text)
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            new, stopped = filter_.push(piece, last=last)
            shown, seen = shown + new, seen + piece
            if stopped:
                break
            assert len(seen) - len(shown) == (0 if last else _held(seen, stops))
        assert (shown, stopped) == _expected(text, stops)
        hits += stopped
    assert hits > 100


def _seconds(stop: str, pieces: list[str]) -> float:
    best = float("inf")
    for _ in range(3):
        filter_ = StopText([stop])
        begin = time.process_time()
        for piece in pieces:
            filter_.push(piece, last=False)
        best = min(best, time.process_time() - begin)
    return best


@pytest.mark.parametrize("piece", ["a", "b", "a" * 50 + "b"])
def test_the_length_of_a_stop_text_costs_nothing_per_token(piece: str):
    """Also if all that is generated is the beginning of the stop text."""
    pieces = [piece] * 400
    short, long = "a" * 1000 + "c", "a" * 400_000 + "c"
    assert _seconds(long, pieces) < 10 * _seconds(short, pieces)


def test_work_is_linear_in_the_text():
    stop = "ab" * 50_000
    few = _seconds(stop, ["ab" * 10] * 200)
    assert _seconds(stop, ["ab" * 10] * 2000) < 40 * few
