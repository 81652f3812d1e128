"""Turns a step's requests into index tensors, plans the wrappers and runs the model."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from . import kernels
from .batch import Batch
from .copies import to_device
from .graphs import Graph
from .invariance import round_up, tile_rows
from .model import Model
from .rope import switch_length
from .table import Settings, Table

WORKSPACE_BYTES = 128 << 20
SCORED_ROWS = 256  # of which logits are in memory at a time: half a megabyte each
UNKNOWN = (-1,)  # tokens of a chunk whose token is still being drawn


@dataclass
class Chunk:
    """The part of a request that a step computes: its tokens ``[start, start + len(tokens))``.

    Attributes
    ----------
    rotation : int
        Result of `ModelConfig.rotation` for the request's length.
    drafts : int
        How many of its last tokens are guesses: logits are computed after these too.
    score : callable, optional
        Gets the logits after all of its tokens, in pieces, with the position of a piece's first.
    slot : int
        Where the request's states are.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    rotation: int = 0
    drafts: int = 0
    score: Callable[[int, torch.Tensor], None] | None = None
    slot: int = 0

    @property
    def end(self) -> int:
        """Tokens of the request that are computed then, without guesses."""
        return self.start + len(self.tokens) - self.drafts


@dataclass
class Runner:
    """A model with its KV cache.

    Attributes
    ----------
    model : Model
        The model that runs.
    num_pages, page_size : int
        Size of the cache.
    kv_dtype : torch.dtype
        Type of the cache; one that is not the model's must have 8 bits.
    max_batch_size : int
        Requests of a step.
    use_cuda_graph : bool
        Whether steps in which every request decodes are replayed from a graph.
    batch_invariant : bool
        Whether a token's result does not depend on what else is in the step: see `invariance`.
    workspace_bytes : int
        Memory for what attention divides among thread blocks.
    prompt_backend : str
        The one that attention for prompts takes.
    before_capture : callable
        Called before a graph is captured.
    """

    model: Model
    num_pages: int
    page_size: int
    kv_dtype: torch.dtype
    max_batch_size: int
    use_cuda_graph: bool
    batch_invariant: bool = False
    workspace_bytes: int = WORKSPACE_BYTES
    prompt_backend: str = "auto"
    before_capture: Callable[[], None] = lambda: None
    _graphs: dict[int, Graph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, device = self.model.config, self.model.device
        shapes = self.model.page_shapes(self.page_size)
        # Zeros: what a page held before must not be NaN where a masked key is multiplied by 0.
        shape = (len(shapes), self.num_pages, *shapes[0])
        self.cache = torch.zeros(*shape, dtype=self.kv_dtype, device=device)
        self.caches = self.model.caches(self.cache, self.max_batch_size + 1)
        self._states = [c for c in self.caches if isinstance(c, tuple)]
        self._computed = [0] * self.max_batch_size  # tokens that each slot's states have seen
        self._settings = Settings(
            torch.zeros(self.workspace_bytes, dtype=torch.uint8, device=device),
            self.page_size,
            self.model.dtype,
            self.kv_dtype,
            self.batch_invariant,
            self.prompt_backend,
        )
        self._tile = tile_rows(device) if self.batch_invariant else None
        # Rows of cosines and sines beyond those of the positions: frequencies of long texts.
        self._switches = switch_length(config.rope, config.max_positions) is not None
        with self.backend():
            self._decode, self._prefill = (
                {spec: spec.wrapper(self._settings, decodes) for spec in self.model.specs}
                for decodes in (True, False)
            )

    def backend(self) -> AbstractContextManager[None]:
        """Where operations run: the GPU's kernels, or their references on the CPU."""
        return kernels.on(self.model.device)

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk], tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the chunks; logits after the last token of each and before its drafts.

        The result is ``[chunks + drafts, vocab]``, of the model's `logits_dtype`, in the order of
        the chunks. Nothing waits for the device. `tokens`, on the device, take the place of the
        chunks' if the host does not know these yet.
        """
        decodes = all(len(chunk.tokens) == 1 and chunk.score is None for chunk in chunks)
        self._begin_states(chunks)
        if decodes and self.use_cuda_graph:
            return self._replay(chunks, tokens)
        count = sum(len(chunk.tokens) for chunk in chunks)
        host = self._table(chunks, len(chunks), round_up(count, self._tile))
        table, batch = self._on_device(host, count, decodes)
        if tokens is not None:
            table.tokens[:count].copy_(tokens)
        rows = self.model.forward(batch, self.caches)
        self._score(chunks, rows)
        return self.model.logits(rows[self._last_rows(chunks, table)], self._tile)

    def _begin_states(self, chunks: Sequence[Chunk]) -> None:
        """Zeros for requests that begin; a state cannot take a token twice."""
        if not self._states:
            return
        for chunk in chunks:
            if chunk.start not in (0, self._computed[chunk.slot]):
                raise RuntimeError(
                    f"the state in slot {chunk.slot} has seen {self._computed[chunk.slot]} tokens, "
                    f"the request continues at {chunk.start}"
                )
            self._computed[chunk.slot] = chunk.start + len(chunk.tokens)
        new = [chunk.slot for chunk in chunks if chunk.start == 0]
        if new:
            slots = to_device(new, torch.int64, self.model.device)
            for states in self._states:
                for state in states:
                    state[slots] = 0

    def _score(self, chunks: Sequence[Chunk], rows: torch.Tensor) -> None:
        end = 0
        for chunk in chunks:
            start, end = end, end + len(chunk.tokens)
            if chunk.score is not None:
                for first in range(start, end, SCORED_ROWS):
                    piece = rows[first : min(end, first + SCORED_ROWS)]
                    chunk.score(chunk.start + first - start, self.model.logits(piece, self._tile))

    def _last_rows(self, chunks: Sequence[Chunk], table: Table) -> torch.Tensor:
        """Rows after which a token is drawn."""
        if not any(chunk.drafts for chunk in chunks):
            return table.qo_indptr[1:].long() - 1
        ends = accumulate(len(chunk.tokens) for chunk in chunks)
        rows = [
            row
            for chunk, end in zip(chunks, ends, strict=True)
            for row in range(end - 1 - chunk.drafts, end)
        ]
        return to_device(rows, torch.int64, self.model.device)

    def _table(self, chunks: Sequence[Chunk], requests: int, tokens: int) -> Table:
        """On the host, with room for so many requests and tokens: those beyond have none."""
        lengths = [chunk.start + len(chunk.tokens) for chunk in chunks]
        # A request may have more pages than this chunk reaches.
        used = [-(-length // self.page_size) for length in lengths]
        # Tens of thousands of pages: an array of arrays takes microseconds, a list a millisecond.
        pages = array("i")
        for chunk, count in zip(chunks, used, strict=True):
            pages.extend(chunk.pages[:count])
        # Pinned: copies from other memory wait for the device. PyTorch takes a tensor's memory
        # again only when copies from it have ended.
        packed = torch.empty(
            Table.length(requests, tokens, len(pages)),
            dtype=torch.int32,
            pin_memory=self.model.device.type == "cuda",
        )
        table = Table.divide(packed, requests, tokens)

        def fill(part: torch.Tensor, values: list[int], rest: int = 0) -> None:
            part[: len(values)].copy_(torch.tensor(values))
            part[len(values) :].fill_(rest)

        fill(table.tokens, [token for chunk in chunks for token in chunk.tokens])
        fill(
            table.rotations,
            [c.rotation + c.start + i for c in chunks for i in range(len(c.tokens))]
            if self._switches
            else [],
        )
        # A kernel finds those of longer chunks: see `_batch`.
        decodes = all(len(chunk.tokens) == 1 for chunk in chunks)
        fill(table.batch_indices, [*range(len(chunks))] if decodes else [], -1)
        fill(table.positions, [length - 1 for length in lengths] if decodes else [])
        ends = list(accumulate(len(chunk.tokens) for chunk in chunks))
        fill(table.qo_indptr, [0, *ends], ends[-1])
        fill(table.lengths, lengths)
        fill(table.kv_indptr, [0, *accumulate(used)], len(pages))
        fill(table.last_page_len, [(length - 1) % self.page_size + 1 for length in lengths])
        fill(table.slots, [chunk.slot for chunk in chunks], -1)
        table.kv_indices.copy_(torch.frombuffer(pages, dtype=torch.int32))
        return table

    def _on_device(
        self, host: Table, count: int, decodes: bool, specs: Sequence[Any] | None = None
    ) -> tuple[Table, Batch]:
        packed = host.packed.to(self.model.device, non_blocking=True)
        table = Table.divide(packed, len(host.lengths), len(host.tokens))
        wrappers = self._decode if decodes else self._prefill
        planned = wrappers if specs is None else {spec: wrappers[spec] for spec in specs}
        self._plan(planned, host, table.kv_indices, host.qo_indptr)
        batch = self._batch(table, count, decodes)
        batch.attention = wrappers
        if self._states and not decodes:
            self._divide(batch, host)
        return table, batch

    def _divide(self, batch: Batch, host: Table) -> None:
        """Tell requests with one new token from those with more."""
        starts, slots = host.qo_indptr.tolist(), host.slots.tolist()
        rows = list(zip(starts[:-1], starts[1:], slots, strict=True))
        batch.prompts = [row for row in rows if row[1] - row[0] > 1]
        singles = [n for n, (start, end, _) in enumerate(rows) if end - start == 1]
        batch.singles = to_device(singles, torch.int64, self.model.device)

    def prepare(self, chunks: Sequence[Chunk], specs: Sequence[Any] | None = None) -> Batch:
        """What the layers of a step get, for calls of single layers.

        `specs`: of the attention that is planned; None: all of it.
        """
        count = sum(len(chunk.tokens) for chunk in chunks)
        host = self._table(chunks, len(chunks), round_up(count, self._tile))
        return self._on_device(host, count, all(len(c.tokens) == 1 for c in chunks), specs)[1]

    def _batch(self, table: Table, attended: int, decodes: bool) -> Batch:
        batch_indices, positions = table.batch_indices, table.positions
        if not decodes:
            batch_indices, positions = kernels.get_batch_indices_positions(
                table.qo_indptr, table.lengths, len(table.tokens)
            )
        return Batch(
            tokens=table.tokens,
            batch_indices=batch_indices,
            positions=positions,
            rotations=table.rotations if self._switches else positions,
            qo_indptr=table.qo_indptr,
            kv_indices=table.kv_indices,
            kv_indptr=table.kv_indptr,
            kv_last_page_len=table.last_page_len,
            slots=table.slots,
            attention={},
            attended=attended,
            decodes=decodes,
            prompts=[],
            singles=table.tokens[:0].long(),
            tile=self._tile,
        )

    def _plan(
        self,
        wrappers: dict[Any, Any],
        host: Table,
        kv_indices: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        """Once a step; `starts`: first row of each request that is planned, and the end."""
        for spec, wrapper in wrappers.items():
            spec.plan(wrapper, self._settings, host, kv_indices, starts)

    def _replay(self, chunks: Sequence[Chunk], tokens: torch.Tensor | None) -> torch.Tensor:
        """A decode step from the smallest graph that takes it, captured when first needed.

        One graph serves every batch up to its capacity and every length: the plan lies in the
        wrappers' buffers, and rows beyond the batch have batch index -1, for which nothing is
        written or attended to.
        """
        count = len(chunks)
        capacity = min(1 << (count - 1).bit_length(), self.max_batch_size)
        if capacity not in self._graphs:
            self._graphs[capacity] = self._new_graph(capacity)
        graph = self._graphs[capacity]
        host = self._table(chunks, capacity, round_up(capacity, self._tile))
        pages = graph.table.kv_indices[: len(host.kv_indices)]  # where the wrappers want them
        # Wrappers for prompts plan every row, those beyond the batch without keys: the first plan
        # says how many rows there may be.
        prompts = self.batch_invariant or any(spec.plans_rows for spec in graph.wrappers)
        planned = capacity if prompts else count
        with graph.overwriting():
            graph.table.packed[: len(host.packed)].copy_(host.packed, non_blocking=True)
            self._plan(graph.wrappers, host, pages, graph.starts[: planned + 1])
        if tokens is not None:
            graph.table.tokens[:count].copy_(tokens)
        logits = self._capture(graph) if graph.graph is None else graph.replay()
        return logits[:count]

    def _new_graph(self, capacity: int) -> Graph:
        longest = min(self.num_pages, -(-self.model.config.max_positions // self.page_size))
        pages = capacity * longest  # more than there are: prefixes are shared
        rows = round_up(capacity, self._tile)
        length = Table.length(capacity, rows, pages)
        packed = torch.zeros(length, dtype=torch.int32, device=self.model.device)
        table = Table.divide(packed, capacity, rows)
        wrappers = {
            spec: spec.wrapper(self._settings, True, graph=table) for spec in self.model.specs
        }
        return Graph(capacity, table, wrappers)

    def _compute(self, graph: Graph) -> torch.Tensor:
        batch = self._batch(graph.table, graph.capacity, decodes=True)
        batch.attention = graph.wrappers
        rows = self.model.forward(batch, self.caches)[: graph.capacity]
        graph.note_read()
        return self.model.logits(rows, self._tile)

    def _capture(self, graph: Graph) -> torch.Tensor:
        self.before_capture()
        return graph.capture(lambda: self._compute(graph))
