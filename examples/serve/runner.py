"""Turns a step's requests into index tensors, plans the wrappers and runs the model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

import flashinfer

from .model import Batch, Model

WORKSPACE_BYTES = 128 << 20


@dataclass
class Chunk:
    """The part of a request that a step computes: its tokens ``[start, start + len(tokens))``.

    `rotation`: from `ModelConfig.rotation`, of the request's length.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    rotation: int = 0


@dataclass
class _Table:
    """Index tensors of a step, on the host."""

    tokens: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor
    lengths: torch.Tensor
    rotations: torch.Tensor | None  # of each token; None: its position


@dataclass
class _Graph:
    """A captured decode step for up to `capacity` requests, with the buffers it reads."""

    capacity: int
    batch: Batch
    qo_indptr: torch.Tensor
    lengths: torch.Tensor
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
    """

    model: Model
    num_pages: int
    page_size: int
    kv_dtype: torch.dtype
    max_batch_size: int
    use_cuda_graph: bool
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
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute the chunks; logits after the last token of each, ``[chunks, vocab]`` float32."""
        table = self._table(chunks)
        decodes = all(len(chunk.tokens) == 1 for chunk in chunks)
        if decodes and self.use_cuda_graph:
            return self._replay(table)
        batch = self._on_device(table)
        if decodes:
            self._plan_decode(self._decode, table)
            batch.attention = self._decode
        else:
            self._plan_prefill(table, batch.kv_indices)
            batch.attention = self._prefill
        last = table.qo_indptr[1:].long() - 1
        rows = self.model.forward(batch, self.cache)
        return self.model.logits(rows[last.to(rows.device)])

    def _table(self, chunks: Sequence[Chunk]) -> _Table:
        def ints(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        def indptr(counts: Sequence[int]) -> torch.Tensor:
            return torch.cat([ints([0]), ints(counts).cumsum(0, dtype=torch.int32)])

        lengths = [chunk.start + len(chunk.tokens) for chunk in chunks]
        # A request may have more pages than this chunk reaches.
        used = [-(-length // self.page_size) for length in lengths]
        # Tens of thousands of pages: an array of arrays takes microseconds, a list a millisecond.
        pages = array("i")
        for chunk, count in zip(chunks, used, strict=True):
            pages.extend(chunk.pages[:count])
        return _Table(
            tokens=ints([token for chunk in chunks for token in chunk.tokens]),
            qo_indptr=indptr([len(chunk.tokens) for chunk in chunks]),
            kv_indptr=indptr(used),
            kv_indices=torch.frombuffer(pages, dtype=torch.int32),
            last_page_len=ints([(length - 1) % self.page_size + 1 for length in lengths]),
            lengths=ints(lengths),
            rotations=ints([c.rotation + c.start + i for c in chunks for i in range(len(c.tokens))])
            if self._switches
            else None,
        )

    def _on_device(self, table: _Table) -> Batch:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.model.device, non_blocking=True)

        batch_indices, positions = flashinfer.get_batch_indices_positions(
            move(table.qo_indptr), move(table.lengths), len(table.tokens)
        )
        return Batch(
            tokens=move(table.tokens),
            batch_indices=batch_indices,
            positions=positions,
            rotations=positions if table.rotations is None else move(table.rotations),
            kv_indices=move(table.kv_indices),
            kv_indptr=move(table.kv_indptr),
            kv_last_page_len=move(table.last_page_len),
            attention={},
        )

    def _plan_prefill(self, table: _Table, kv_indices: torch.Tensor) -> None:
        """Once a step: index tensors that the planner reads stay on the host."""
        config = self.model.config
        for window, wrapper in self._prefill.items():
            wrapper.plan(
                table.qo_indptr,
                table.kv_indptr,
                kv_indices,
                table.last_page_len,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                self.page_size,
                causal=True,
                window_left=window,
                q_data_type=self.model.dtype,
                kv_data_type=self.kv_dtype,
                o_data_type=self.model.dtype,
            )

    def _plan_decode(self, wrappers: dict[int, Any], table: _Table) -> None:
        config = self.model.config
        for window, wrapper in wrappers.items():
            wrapper.plan(
                table.kv_indptr,
                table.kv_indices,
                table.last_page_len,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                self.page_size,
                window_left=window,
                q_data_type=self.model.dtype,
                kv_data_type=self.kv_dtype,
                o_data_type=self.model.dtype,
            )

    def _replay(self, table: _Table) -> torch.Tensor:
        """A decode step from the smallest graph that takes it, captured when first needed.

        One graph serves every batch up to its capacity and every length: the plan lies in the
        wrappers' buffers, and rows beyond the batch have batch index -1, for which nothing is
        written or attended to.
        """
        count = len(table.tokens)
        capacity = min(1 << (count - 1).bit_length(), self.max_batch_size)
        if capacity not in self._graphs:
            self._graphs[capacity] = self._new_graph(capacity)
        graph = self._graphs[capacity]
        self._fill(graph, table, count)
        if graph.graph is None:
            return self._capture(graph)[:count]
        graph.graph.replay()
        assert graph.rows is not None
        return graph.rows[:count]

    def _new_graph(self, capacity: int) -> _Graph:
        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self.model.device)

        longest = min(self.num_pages, -(-self.model.config.max_positions // self.page_size))
        indices = buffer(capacity * longest)  # more than there are pages: prefixes are shared
        wrappers: dict[int, Any] = {}
        # The wrappers of the windows have the same page table, hence the same buffers.
        indptr, last = buffer(capacity + 1), buffer(capacity)
        for window in self._windows:
            wrappers[window] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last,
            )
        tokens, batch_indices, positions = (buffer(capacity) for _ in range(3))
        rotations = buffer(capacity) if self._switches else positions
        batch = Batch(tokens, batch_indices, positions, rotations, indices, indptr, last, wrappers)
        return _Graph(capacity, batch, buffer(capacity + 1), buffer(capacity))

    def _fill(self, graph: _Graph, table: _Table, count: int) -> None:
        self._plan_decode(graph.batch.attention, table)
        graph.batch.tokens[:count].copy_(table.tokens, non_blocking=True)
        if table.rotations is not None:
            graph.batch.rotations[:count].copy_(table.rotations, non_blocking=True)
        # Requests beyond the batch have no tokens: their rows belong to no request.
        graph.qo_indptr.fill_(count)
        graph.qo_indptr[: count + 1].copy_(table.qo_indptr, non_blocking=True)
        graph.lengths[:count].copy_(table.lengths, non_blocking=True)
        flashinfer.get_batch_indices_positions(
            graph.qo_indptr,
            graph.lengths,
            graph.capacity,
            batch_indices=graph.batch.batch_indices,
            positions=graph.batch.positions,
        )

    def _capture(self, graph: _Graph) -> torch.Tensor:
        # The first run compiles what is missing, and its result is this step's. A capture only
        # records, so that the cache is written once.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            logits = self.model.logits(self.model.forward(graph.batch, self.cache))
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            graph.rows = self.model.logits(self.model.forward(graph.batch, self.cache))
        graph.graph = captured
        return logits
