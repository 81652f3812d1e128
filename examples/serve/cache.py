"""Which request has which pages of the KV cache, and which pages hold prefixes worth keeping."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def page_keys(tokens: Sequence[int], page_size: int, parent: bytes = b"") -> list[bytes]:
    """A key for each full page of `tokens`: equal keys, equal tokens from the beginning on.

    Parameters
    ----------
    tokens : sequence of int
        Token ids, from the beginning of a page on.
    page_size : int
        Tokens of a page.
    parent : bytes
        Key of the page before the first; empty if there is none.
    """
    keys = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        # SHA-256, as requests of different users share pages: a collision would mix them up.
        page = array("q", tokens[start : start + page_size]).tobytes()
        parent = hashlib.sha256(parent + page).digest()
        keys.append(parent)
    return keys


class PagePool:
    """Pages with reference counts; full ones stay findable by key until they are needed.

    Parameters
    ----------
    num_pages : int
        Pages of the cache.

    Raises
    ------
    ValueError
        If `num_pages` is less than 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"`num_pages` must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._users = [0] * num_pages
        self._empty = list(range(num_pages - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # with a key, oldest first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that no request has, those with a key included."""
        return len(self._empty) + len(self._unused)

    def allocate(self) -> int | None:
        """A page for one request, or None if all are in use."""
        if self._empty:
            page = self._empty.pop()
        elif self._unused:
            page, _ = self._unused.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        else:
            return None
        self._users[page] = 1
        return page

    def share(self, key: bytes) -> int | None:
        """The page with this key, for one more request, or None if there is none."""
        page = self._page_of.get(key)
        if page is not None:
            self._users[page] += 1
            self._unused.pop(page, None)
        return page

    def publish(self, page: int, key: bytes) -> None:
        """Let others find a page that is full from now on. The first with a key is kept."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Give up a request's pages."""
        # The last first: a prefix is of use without what follows it, not the other way round.
        for page in reversed(pages):
            self._users[page] -= 1
            assert self._users[page] >= 0, f"page {page} was released twice"
            if self._users[page] == 0:
                if page in self._key_of:
                    self._unused[page] = None
                else:
                    self._empty.append(page)
