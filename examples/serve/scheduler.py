"""Who is served in a step: a fair share of its tokens, and the pages that these need."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter

from .cache import PagePool, page_keys
from .runner import UNKNOWN, Chunk
from .state import RequestState

Scheduled = list[tuple[RequestState, Chunk]]

_ARRIVAL = attrgetter("arrival")


def token_shares(
    decoding: int, prompts: Sequence[RequestState], budget: int
) -> dict[RequestState, int]:
    """How many tokens of a step each prompt gets.

    Requests that decode take one token each. Half of the rest is kept for the oldest prompt, which
    makes progress whatever else arrives. The other half goes to the prompts with the fewest tokens
    left: a short prompt does not wait for a long one. Requests that have drawn tokens and lost
    their pages come first: where pages are few, new requests would only take more of them.

    Parameters
    ----------
    decoding : int
        Number of requests that decode.
    prompts : sequence of RequestState
        Requests with more than one token to compute, in the order of their arrival.
    budget : int
        Most tokens of the step.

    Returns
    -------
    dict
        Tokens of each prompt, 0 for those that have to wait.
    """
    if not prompts:
        return {}
    rest = budget - decoding
    oldest = prompts[0]
    shares = dict.fromkeys(prompts, 0)
    shares[oldest] = min(oldest.missing, -(-rest // 2))
    rest -= shares[oldest]
    # Equal ones stay in their order.
    for request in sorted(prompts, key=lambda request: (not request.drawn, request.missing)):
        more = min(request.missing - shares[request], rest)
        shares[request] += more
        rest -= more
    return shares


def whole_prompts(
    decoding: int, prompts: Sequence[RequestState], budget: int
) -> dict[RequestState, int]:
    """Tokens of a step as `token_shares`, for prompts that are not divided: all or none of each."""
    rest = budget - decoding
    shares = {}
    for request in prompts:
        shares[request] = request.missing if request.missing <= rest else 0
        rest -= shares[request]
    return shares


class Scheduler:
    """The requests that run or wait, and which tokens of them the next step computes.

    Parameters
    ----------
    pool : PagePool
        Pages of the KV cache.
    page_size : int
        Tokens of a page.
    max_batch_size, max_batch_tokens : int
        Most requests and most tokens of a step.
    rotation : callable
        `ModelConfig.rotation`: equal tokens of other rotations share no page.
    prefix_caching : bool
        Whether requests share pages of equal tokens.
    chunked_prefill : bool
        Whether a prompt may take several steps.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        max_batch_size: int,
        max_batch_tokens: int,
        rotation: Callable[[int], int],
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
    ) -> None:
        self.pool = pool
        # Both in the order of arrival.
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self._page_size = page_size
        self._max_batch_size, self.max_batch_tokens = max_batch_size, max_batch_tokens
        self._rotation, self._prefix_caching = rotation, prefix_caching
        self._shares = token_shares if chunked_prefill else whole_prompts
        self._arrivals = count()
        self._slots = list(range(max_batch_size))
        self.cached_tokens = 0

    def add(self, request: RequestState) -> None:
        """Let a request wait."""
        request.arrival = next(self._arrivals)
        self.waiting.append(request)

    def schedule(self) -> Scheduled:
        """Chunks of this step: running requests first, then new ones while there is room."""
        prompts = [request for request in self.running if request.missing > 1]
        decoding = len(self.running) - len(prompts)
        candidates = self.waiting[: self._max_batch_size - len(self.running)]
        shares = self._shares(decoding, prompts + candidates, self.max_batch_tokens)
        chunks, preempted = self._serve_running(shares)
        if not preempted:
            chunks += self._serve_new(candidates, shares)
        return chunks

    def _serve_running(self, shares: dict[RequestState, int]) -> tuple[Scheduled, bool]:
        """Chunks of the running requests, and whether one of these had to yield its pages."""
        chunks: Scheduled = []
        before = len(self.running)
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted by an older one
            length = shares.get(request, 1)
            if length and self._grow(request, request.computed + length):
                chunks.append(self._chunk(request, length))
        return chunks, len(self.running) < before

    def _serve_new(
        self, candidates: Sequence[RequestState], shares: dict[RequestState, int]
    ) -> Scheduled:
        """Chunks of waiting requests, in the order of their arrival as far as pages reach."""
        chunks: Scheduled = []
        surplus = 0  # tokens of shares that the cache has already
        for request in candidates:
            share = shares[request] + surplus
            if share == 0:
                continue
            self._share_prefix(request)
            length = min(request.missing, share)
            if not self._admit(request, length):
                break
            surplus = share - length
            self.cached_tokens += request.computed
            self.waiting.remove(request)
            insort(self.running, request, key=_ARRIVAL)
            chunks.append(self._chunk(request, length))
        return chunks

    def foresee(self, requests: Sequence[RequestState]) -> Scheduled | None:
        """The step after one that draws a token for each of `requests`.

        Returns
        -------
        list or None
            Chunks of the tokens that are being drawn; None if the step depends on these tokens.
        """
        if self.waiting or requests != self.running:
            return None
        if any(request.params.grammar is not None for request in requests):
            return None  # the mask of a token follows from the one before
        pages = 0
        for request in requests:
            length = len(request.tokens) + 1  # with the token that is being drawn
            if length - request.prompt_length >= request.max_tokens:
                return None
            if self._rotation(length) != self._rotation(length - 1):
                return None  # computed again
            pages += self._missing_pages(request, length)
        if pages > self.pool.num_free:
            return None
        return [self._next_chunk(request) for request in requests]

    def reserve(self, request: RequestState, length: int) -> bool:
        """Pages for `length` tokens, if no running request needs them and keys stay as they are."""
        missing = self._missing_pages(request, length)
        if missing > self.pool.num_free - len(self.running):
            return False
        return self._rotation(length) == self.rotation_of(request) and self._grow(request, length)

    def publish(self, request: RequestState) -> None:
        """Let later requests share the pages that have become full."""
        if not self._prefix_caching:
            return
        done = len(request.keys)
        parent = request.keys[-1] if done else self._root(request)
        new = request.tokens[done * self._page_size : request.computed]
        for key in page_keys(new, self._page_size, parent):
            self.pool.publish(request.pages[len(request.keys)], key)
            request.keys.append(key)

    def release(self, request: RequestState) -> None:
        """Take a request's pages: it is computed again, with what the cache still has of it."""
        self.pool.release(request.pages)
        request.pages, request.keys, request.computed = array("i"), [], 0
        if request.slot is not None:
            self._slots.append(request.slot)
            request.slot = None

    def forget(self, request: RequestState) -> None:
        """End a request."""
        self.release(request)
        (self.running if request in self.running else self.waiting).remove(request)

    def rotation_of(self, request: RequestState) -> int:
        """Which rotation a request's keys have at its present length."""
        return self._rotation(len(request.tokens))

    def _chunk(self, request: RequestState, length: int) -> tuple[RequestState, Chunk]:
        start = request.computed
        tokens = request.tokens[start : start + length]
        rotation = self.rotation_of(request)
        slot = self._slot(request)
        return request, Chunk(tokens, start, request.pages, rotation, 0, request.score, slot)

    def _next_chunk(self, request: RequestState) -> tuple[RequestState, Chunk]:
        """The token that is being drawn."""
        start = request.computed
        self._grow(request, start + 1)
        rotation, slot = self._rotation(start + 1), self._slot(request)
        return request, Chunk(UNKNOWN, start, request.pages, rotation, slot=slot)

    def _slot(self, request: RequestState) -> int:
        """Its own from its first chunk until it is released."""
        if request.slot is None:
            request.slot = self._slots.pop()  # as many as requests that run
        return request.slot

    def _missing_pages(self, request: RequestState, length: int) -> int:
        return -(-length // self._page_size) - len(request.pages)

    def _grow(self, request: RequestState, length: int) -> bool:
        """Pages for `length` tokens, at the cost of younger requests; False if it had to yield."""
        while self._missing_pages(request, length) > 0:
            page = self.pool.allocate()
            if page is not None:
                request.pages.append(page)
                continue
            youngest = self.running.pop()
            self.release(youngest)
            insort(self.waiting, youngest, key=_ARRIVAL)
            if youngest is request:
                return False
        return True

    def _admit(self, request: RequestState, length: int) -> bool:
        """Pages for a waiting request's first chunk, if they are there without preemption.

        A page is left for each running request, else it could be thrown out at the next step.
        """
        needed = self._missing_pages(request, request.computed + length)
        if needed + len(self.running) > self.pool.num_free and self.running:
            self.release(request)
            return False
        for _ in range(needed):
            page = self.pool.allocate()
            assert page is not None, "add_request refuses what does not fit an empty cache"
            request.pages.append(page)
        return True

    def _share_prefix(self, request: RequestState) -> None:
        """Take the pages that are in the cache; the last token is left, for its logits."""
        if not self._prefix_caching or request.score is not None:
            return
        for key in page_keys(request.tokens[:-1], self._page_size, self._root(request)):
            page = self.pool.share(key)
            if page is None:
                break
            request.pages.append(page)
            request.keys.append(key)
        request.computed = len(request.pages) * self._page_size

    def _root(self, request: RequestState) -> bytes:
        """Parent of a request's first page: equal tokens of other frequencies are not shared."""
        return self.rotation_of(request).to_bytes(8, "big")
