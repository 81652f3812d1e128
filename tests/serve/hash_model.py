"""A model that costs nothing: its next token is a hash of what the pages of a request hold."""

from __future__ import annotations

import contextlib
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from examples.serve import engine
from examples.serve.engine import Engine
from examples.serve.runner import Chunk

NextToken = Callable[[Sequence[int]], int]


def next_token(tokens: Sequence[int]) -> int:
    """Depends on every token."""
    return zlib.crc32(array("H", tokens).tobytes()) % 256


def repetitive_token(tokens: Sequence[int]) -> int:
    """Depends on the last two tokens most of the time, on every token at others."""
    choice, token = divmod(zlib.crc32(array("H", tokens[-2:]).tobytes()), 4)
    return token if choice % 6 else next_token(tokens) % 4


class HashModel:
    """Writes tokens to pages as a model writes keys and values, and reads them back."""

    def __init__(self, served: Engine, follow: NextToken) -> None:
        scheduler = served._scheduler
        self.pool, self.page_size = served._pool, served.page_size
        self.limits = scheduler._max_batch_size, scheduler.max_batch_tokens
        self.follow = follow
        self.content: list[list[int]] = [[] for _ in range(self.pool.num_pages)]
        self.computed = self.ahead = 0

    def run(self, chunks: Sequence[Chunk], tokens: torch.Tensor | None = None) -> torch.Tensor:
        if tokens is not None:
            self.ahead += 1
            drawn = tokens.tolist()
            chunks = [replace(c, tokens=[t]) for c, t in zip(chunks, drawn, strict=True)]
        assert 1 <= len(chunks) <= self.limits[0]
        assert sum(len(chunk.tokens) for chunk in chunks) <= self.limits[1]
        for chunk in chunks:
            self._write(chunk)
        # Read after all have written, as the layers do.
        return torch.tensor(
            [
                [self.follow(self._read(chunk)[:end])]
                for chunk in chunks
                for end in range(chunk.end, chunk.end + chunk.drafts + 1)
            ]
        )

    def _write(self, chunk: Chunk) -> None:
        for position, token in enumerate(chunk.tokens, chunk.start):
            page, slot = chunk.pages[position // self.page_size], position % self.page_size
            assert self.pool._users[page] == 1, "a page that others read is written"
            del self.content[page][slot:]
            self.content[page].append(token)
        self.computed += len(chunk.tokens)

    def _read(self, chunk: Chunk) -> list[int]:
        length = chunk.start + len(chunk.tokens)
        return [token for page in chunk.pages for token in self.content[page]][:length]


def install(
    monkeypatch: pytest.MonkeyPatch, served: Engine, follow: NextToken = next_token
) -> HashModel:
    """Put it in the place of an engine's model; every draw takes its token."""
    model = HashModel(served, follow)
    monkeypatch.setattr(served._runner, "run", model.run)
    monkeypatch.setattr(served._runner, "backend", contextlib.nullcontext)
    monkeypatch.setattr(engine, "sample", lambda logits, *others: logits[:, 0])
    return model
