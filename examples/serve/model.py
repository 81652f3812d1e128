"""Weights on a device and the forward pass, which is the same for all models: a row of blocks."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import embedding

from .batch import Batch as Batch
from .config import ModelConfig
from .invariance import in_tiles, padded, round_up
from .layers.body import Block
from .layers.linear import Linear, Sum
from .layers.norm import Norm
from .layers.weights import Weights
from .models import architectures

if TYPE_CHECKING:
    from .parallel import Parallel


class Model:
    """Weights on a device, and the forward pass.

    Parameters
    ----------
    config : ModelConfig
        Shapes.
    tensors : mutable mapping or Weights
        Tensors of a checkpoint by name; emptied, so that memory is freed while layers are fused.
    device : str or torch.device
        Where they are.
    dtype : torch.dtype
        float16 or bfloat16.
    parallel : Parallel, optional
        The ranks that divide the model; each gives the whole checkpoint.

    Attributes
    ----------
    blocks : list of Block
        The layers.
    specs : list
        Plans of attention; layers with equal ones share a wrapper.
    rounds : bool
        Whether some norms round their result to 8 bits.

    Raises
    ------
    ValueError
        If a tensor is missing or left over, has another shape, or `dtype` is another one.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: MutableMapping[str, torch.Tensor] | Weights,
        device: str | torch.device,
        dtype: torch.dtype,
        parallel: Parallel | None = None,
    ) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"`dtype` must be torch.float16 or torch.bfloat16, got {dtype}")
        kind = architectures()[config.architecture]
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        if isinstance(tensors, Weights):
            take = tensors
        else:
            quantization = config.values.get("quantization_config") or {}
            take = Weights(tensors, self.device, dtype, quantization)
        if parallel is not None:
            take.ranks = parallel.ranks(config)
        self._decoder = kind(config, take)
        hidden, vocabulary = config.hidden_size, config.vocab_size
        self.embedding = take.matrix(kind.embedding_name, vocabulary, hidden)
        self.blocks = list(self._decoder.blocks())
        self.norm = self._decoder.norm(kind.norm_name)
        # Some files repeat a tied matrix; it is the embedding's.
        head = take.optional("lm_head.weight", vocabulary, hidden)
        if config.tied_embeddings:
            self.head = self.embedding.t()
        elif head is not None:
            self.head = head.t().contiguous()
        else:
            raise ValueError("the checkpoint must have 'lm_head.weight', it has not")
        take.finish()
        if parallel is not None:
            parallel.open(hidden, dtype)
        self._parallel = parallel
        bodies = [block.body for block in self.blocks]
        self.specs = list(dict.fromkeys(body.spec for body in bodies if body.spec is not None))
        self.has_states = any(body.new_state(1, self.device) is not None for body in bodies)
        self.is_invariant = all(body.invariant for body in bodies)
        # After which blocks the norm rounds to 8 bits, because nothing else reads its result.
        rounds = [after.norm.rounds and after.body.takes_codes for after in self.blocks[1:]]
        self._rounds = [parallel is None and each for each in (*rounds, False)]
        self.rounds = any(self._rounds)

    def page_shapes(self, page_size: int) -> list[tuple[int, ...]]:
        """Shape of a page of each layer that has any; all are equal."""
        shapes = [block.body.page_shape(page_size) for block in self.blocks]
        found = [shape for shape in shapes if shape is not None]
        if len(set(found)) != 1:
            raise ValueError(f"layers must have pages of one shape, got {sorted(set(found))}")
        return found

    def caches(self, pages: torch.Tensor, slots: int) -> list[Any]:
        """The memory of each block: its part of the pages, or a state for each slot.

        Parameters
        ----------
        pages : torch.Tensor
            ``[layers that have pages, pages, *page_shape]``.
        slots : int
            Requests, and one more for padding.
        """
        parts = iter(pages)
        return [
            block.body.new_state(slots, self.device)
            if block.body.page_shape(1) is None
            else next(parts)
            for block in self.blocks
        ]

    def forward(self, batch: Batch, caches: list[Any]) -> torch.Tensor:
        """Append what a batch leaves in the cache.

        Parameters
        ----------
        batch : Batch
            The new tokens.
        caches : list
            Result of `caches`.

        Returns
        -------
        torch.Tensor
            ``[nnz, hidden_size]``, normalised: see `logits`.
        """
        residual = self._decoder.embed(embedding(batch.tokens, self.embedding))
        x = in_tiles(batch.tile, self.blocks[0].norm, residual)
        norms = [block.norm for block in self.blocks[1:]] + [self.norm]
        for number, (block, cache, norm) in enumerate(zip(self.blocks, caches, norms, strict=True)):
            product = self._last_with_norm(number, block, norm, batch)
            body = block.body if product is None else block.body.before_last
            given, x = x, body(x, batch, cache)
            residual = given.total if isinstance(given, Sum) else residual
            if product is not None:
                x = product.add_norm(x, residual, norm.weight, norm.eps)
            elif self._joins(number, block, batch):
                x = norm.later(x, residual)
            elif batch.tile is None and self._rounds[number]:
                x = norm.add_rounded(x if block.after is None else block.after(x), residual)
            else:
                x = in_tiles(batch.tile, partial(self._add, block.after, norm), x, residual)
        return x

    def _last_with_norm(self, number: int, block: Block, norm: Norm, batch: Batch) -> Linear | None:
        """A block's last product if it computes the norm after it, too."""
        last = block.body.last
        if not isinstance(last, Linear) or not last.adds_norm(len(batch.tokens)):
            return None
        if self._parallel is not None or self._rounds[number] or self._joins(number, block, batch):
            return None
        alone = batch.tile is None and block.after is None and not norm.plus_one
        return last if alone and norm.weight.dtype == last.weight.dtype else None

    def _joins(self, number: int, block: Block, batch: Batch) -> bool:
        """Whether the next block's first product computes the norm of its one row."""
        if len(batch.tokens) != 1 or number + 1 == len(self.blocks) or self._parallel is not None:
            return False
        after = self.blocks[number + 1]
        joins = block.after is None and not after.norm.plus_one and after.body.takes_sums
        return batch.tile is None and joins

    def _add(
        self, after: Norm | None, norm: Norm, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """In place ``residual += after(x)``, of the ranks' sum of `x`; its norm."""
        if self._parallel is not None and after is None:
            self._parallel.add_norm(x, residual, norm)
            return x
        if self._parallel is not None:
            self._parallel.sum(x)
        x = x if after is None else after(x)
        norm.add(x, residual)
        return x

    def logits(self, x: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """``[rows, vocab_size]`` `logits_dtype` of rows of `forward`; `tile`: see `in_tiles`."""
        whole = padded(x, round_up(len(x), tile))
        logits = in_tiles(tile, lambda rows: rows @ self.head, whole)[: len(x)]
        return self._decoder.logits(logits)

    @property
    def logits_dtype(self) -> torch.dtype:
        """The model's dtype, or float32 if its last product's result is changed."""
        return self._decoder.logits(torch.empty(0, dtype=self.dtype)).dtype
