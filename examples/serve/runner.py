"""Turns a step's requests into index tensors, plans the wrappers and runs the model."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

import flashinfer

from .invariance import ATTENTION, round_up, tile_rows
from .model import Batch, Model

WORKSPACE_BYTES = 128 << 20
SCORED_ROWS = 256  # of which logits are in memory at a time: half a megabyte each
UNKNOWN = (-1,)  # tokens of a chunk whose token is still being drawn


@dataclass
class Chunk:
    """The part of a request that a step computes: its tokens ``[start, start + len(tokens))``.

    Attributes
    ----------
    rotation : int
        From `ModelConfig.rotation`, of the request's length.
    drafts : int
        How many of its last tokens are guesses: logits are computed after these too.
    score : callable, optional
        Gets the logits after all of its tokens, in pieces, with the position of a piece's first.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    rotation: int = 0
    drafts: int = 0
    score: Callable[[int, torch.Tensor], None] | None = None

    @property
    def end(self) -> int:
        """Tokens of the request that are computed then, without guesses."""
        return self.start + len(self.tokens) - self.drafts


@dataclass
class _Table:
    """Index arrays of a step, int32: parts of one tensor, so that one copy moves all of them."""

    packed: torch.Tensor
    tokens: torch.Tensor
    rotations: torch.Tensor  # of each token; without switches of frequencies unused
    qo_indptr: torch.Tensor
    lengths: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    kv_indices: torch.Tensor

    @staticmethod
    def divide(packed: torch.Tensor, requests: int, tokens: int) -> _Table:
        """Parts for so many requests and tokens; what is left is for page numbers."""
        sizes = [tokens, tokens, requests + 1, requests, requests + 1, requests]
        return _Table(packed, *packed.split([*sizes, len(packed) - sum(sizes)]))

    @staticmethod
    def length(requests: int, tokens: int, pages: int) -> int:
        """Elements of the whole."""
        return 2 * tokens + 4 * requests + 2 + pages


@dataclass
class _Graph:
    """A captured decode step for up to `capacity` requests, with the buffers it reads."""

    capacity: int
    table: _Table
    wrappers: dict[int, Any]
    graph: Any = None
    rows: torch.Tensor | None = None  # logits, after the capture


@dataclass
class Runner:
    """A model with its KV cache.

    Attributes
    ----------
    model : Model
        What runs.
    num_pages, page_size : int
        Of the cache.
    kv_dtype : torch.dtype
        Of the cache; one that is not the model's must have 8 bits.
    max_batch_size : int
        Requests of a step.
    use_cuda_graph : bool
        Whether steps in which every request decodes are replayed from a graph.
    batch_invariant : bool
        Whether a token's result does not depend on what else is in the step: see `invariance`.
    """

    model: Model
    num_pages: int
    page_size: int
    kv_dtype: torch.dtype
    max_batch_size: int
    use_cuda_graph: bool
    batch_invariant: bool = False
    _graphs: dict[int, _Graph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, device = self.model.config, self.model.device
        shape = (config.num_layers, self.num_pages, 2, self.page_size)
        # Zeros: what a page held before must not be NaN where a masked key is multiplied by 0.
        self.cache = torch.zeros(
            *shape, config.num_kv_heads, config.head_dim, dtype=self.kv_dtype, device=device
        )
        # Wrappers of one stream run one after the other and may share the workspace.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._tile = tile_rows(device) if self.batch_invariant else None
        self._plan_options: dict[str, Any] = ATTENTION if self.batch_invariant else {}
        self._windows = sorted(set(config.windows))
        # Rows of cosines and sines beyond those of the positions: frequencies of long texts.
        self._switches = len(self.model.cos_sin) > config.max_positions
        with self.backend():
            self._prefill = {
                w: flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace)
                for w in self._windows
            }
            self._decode = {
                w: flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace)
                for w in self._windows
            }

    def backend(self) -> AbstractContextManager[None]:
        """Where operations run: the GPU's kernels, or their references on the CPU."""
        if self.model.device.type == "cpu":
            return flashinfer.reference_backend()
        return torch.cuda.device(self.model.device)  # streams and graphs are those of this GPU

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk], tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the chunks; logits after the last token of each and before its drafts.

        The result is ``[chunks + drafts, vocab]`` float32, in the order of the chunks. Nothing
        waits for the device. `tokens`, on the device, take the place of the chunks' if the host
        does not know these yet.
        """
        decodes = all(len(chunk.tokens) == 1 and chunk.score is None for chunk in chunks)
        if decodes and self.use_cuda_graph:
            return self._replay(chunks, tokens)
        count = sum(len(chunk.tokens) for chunk in chunks)
        host = self._table(chunks, len(chunks), round_up(count, self._tile))
        table, batch = self._on_device(host, count)
        if tokens is not None:
            table.tokens[:count].copy_(tokens)
        if decodes:
            self._plan_decode(self._decode, host, table.kv_indices, len(chunks))
            batch.attention = self._decode
        else:
            self._plan_prefill(host, table.kv_indices)
            batch.attention = self._prefill
        rows = self.model.forward(batch, self.cache)
        self._score(chunks, rows)
        return self.model.logits(rows[self._last_rows(chunks, table)], self._tile)

    def _score(self, chunks: Sequence[Chunk], rows: torch.Tensor) -> None:
        end = 0
        for chunk in chunks:
            start, end = end, end + len(chunk.tokens)
            if chunk.score is not None:
                for first in range(start, end, SCORED_ROWS):
                    piece = rows[first : min(end, first + SCORED_ROWS)]
                    chunk.score(chunk.start + first - start, self.model.logits(piece, self._tile))

    def _last_rows(self, chunks: Sequence[Chunk], table: _Table) -> torch.Tensor:
        """Rows after which a token is drawn."""
        if not any(chunk.drafts for chunk in chunks):
            return table.qo_indptr[1:].long() - 1
        ends = accumulate(len(chunk.tokens) for chunk in chunks)
        rows = [
            row
            for chunk, end in zip(chunks, ends, strict=True)
            for row in range(end - 1 - chunk.drafts, end)
        ]
        on_gpu = self.model.device.type == "cuda"
        return torch.tensor(rows, pin_memory=on_gpu).to(self.model.device, non_blocking=True)

    def _table(self, chunks: Sequence[Chunk], requests: int, tokens: int) -> _Table:
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
            _Table.length(requests, tokens, len(pages)),
            dtype=torch.int32,
            pin_memory=self.model.device.type == "cuda",
        )
        table = _Table.divide(packed, requests, tokens)

        def fill(part: torch.Tensor, values: list[int], rest: int = 0) -> None:
            part.copy_(torch.tensor(values + [rest] * (len(part) - len(values))))

        fill(table.tokens, [token for chunk in chunks for token in chunk.tokens])
        fill(
            table.rotations,
            [c.rotation + c.start + i for c in chunks for i in range(len(c.tokens))]
            if self._switches
            else [],
        )
        ends = list(accumulate(len(chunk.tokens) for chunk in chunks))
        fill(table.qo_indptr, [0, *ends], ends[-1])
        fill(table.lengths, lengths)
        fill(table.kv_indptr, [0, *accumulate(used)], len(pages))
        fill(table.last_page_len, [(length - 1) % self.page_size + 1 for length in lengths])
        table.kv_indices.copy_(torch.frombuffer(pages, dtype=torch.int32))
        return table

    def _on_device(self, host: _Table, count: int) -> tuple[_Table, Batch]:
        packed = host.packed.to(self.model.device, non_blocking=True)
        table = _Table.divide(packed, len(host.lengths), len(host.tokens))
        return table, self._batch(table, count)

    def _batch(self, table: _Table, attended: int) -> Batch:
        batch_indices, positions = flashinfer.get_batch_indices_positions(
            table.qo_indptr, table.lengths, len(table.tokens)
        )
        return Batch(
            tokens=table.tokens,
            batch_indices=batch_indices,
            positions=positions,
            rotations=table.rotations if self._switches else positions,
            kv_indices=table.kv_indices,
            kv_indptr=table.kv_indptr,
            kv_last_page_len=table.last_page_len,
            attention={},
            attended=attended,
            tile=self._tile,
        )

    def _plan_prefill(self, host: _Table, kv_indices: torch.Tensor) -> None:
        """Once a step; what the planner reads is on the host, page numbers are on the device."""
        config = self.model.config
        for window, wrapper in self._prefill.items():
            wrapper.plan(
                host.qo_indptr,
                host.kv_indptr,
                kv_indices,
                host.last_page_len,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                self.page_size,
                causal=True,
                window_left=window,
                q_data_type=self.model.dtype,
                kv_data_type=self.kv_dtype,
                o_data_type=self.model.dtype,
                **self._plan_options,
            )

    def _plan_decode(
        self, wrappers: dict[int, Any], host: _Table, kv_indices: torch.Tensor, count: int
    ) -> None:
        config = self.model.config
        for window, wrapper in wrappers.items():
            wrapper.plan(
                host.kv_indptr[: count + 1],
                kv_indices,
                host.last_page_len[:count],
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                self.page_size,
                window_left=window,
                q_data_type=self.model.dtype,
                kv_data_type=self.kv_dtype,
                o_data_type=self.model.dtype,
                **self._plan_options,
            )

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
        graph.table.packed[: len(host.packed)].copy_(host.packed, non_blocking=True)
        if tokens is not None:
            graph.table.tokens[:count].copy_(tokens)
        pages = graph.table.kv_indices[: len(host.kv_indices)]  # where the wrappers want them
        self._plan_decode(graph.wrappers, host, pages, count)
        if graph.graph is None:
            return self._capture(graph)[:count]
        graph.graph.replay()
        assert graph.rows is not None
        return graph.rows[:count]

    def _new_graph(self, capacity: int) -> _Graph:
        longest = min(self.num_pages, -(-self.model.config.max_positions // self.page_size))
        pages = capacity * longest  # more than there are: prefixes are shared
        rows = round_up(capacity, self._tile)
        length = _Table.length(capacity, rows, pages)
        packed = torch.zeros(length, dtype=torch.int32, device=self.model.device)
        table = _Table.divide(packed, capacity, rows)
        # The wrappers of the windows have the same page table, hence the same buffers.
        wrappers: dict[int, Any] = {
            window: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=table.kv_indptr,
                paged_kv_indices_buffer=table.kv_indices,
                paged_kv_last_page_len_buffer=table.last_page_len,
            )
            for window in self._windows
        }
        return _Graph(capacity, table, wrappers)

    def _compute(self, graph: _Graph) -> torch.Tensor:
        batch = self._batch(graph.table, graph.capacity)
        batch.attention = graph.wrappers
        rows = self.model.forward(batch, self.cache)[: graph.capacity]
        return self.model.logits(rows, self._tile)

    def _capture(self, graph: _Graph) -> torch.Tensor:
        # The first run compiles what is missing, and its result is this step's. A capture only
        # records, so that the cache is written once.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            logits = self._compute(graph)
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            graph.rows = self._compute(graph)
        graph.graph = captured
        return logits
