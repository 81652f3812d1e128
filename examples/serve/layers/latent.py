"""Multi-head latent attention: absorbed where requests decode, expanded for prompts.

A token leaves one latent row and one rotary row in the cache, which all heads share. Where a
request decodes, queries are multiplied by the up-projection of keys and the results by that of
values, so that attention reads the cache as it is. For the tokens of a prompt it is cheaper to
project the cache up to keys and values of each head.

Source: DeepSeek-AI, "DeepSeek-V2", 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .. import kernels
from ..batch import Batch
from .attention import Rope
from .body import Body, LaterBatch
from .division import COLUMNS, ROWS, WHOLE, Cuts
from .linear import Codes, Fp8Blocks, Product
from .norm import Norm

if TYPE_CHECKING:
    from ..table import Settings, Table

Rows = slice | torch.Tensor | None
"""Tokens of a step: all, those with these numbers, or none."""


@dataclass
class LatentWrappers:
    """Both kernels, planned for their shares of a step.

    Attributes
    ----------
    absorbed, expanded : object
        The wrappers of the two.
    decoding, prompts : slice, torch.Tensor or None
        Tokens that take each.
    keys : torch.Tensor or None
        Rows of the cache, as if it were ``[pages * page_size, ...]``, that prompts attend to.
    """

    absorbed: Any
    expanded: Any
    decoding: Rows = None
    prompts: Rows = None
    keys: torch.Tensor | None = None


@dataclass(frozen=True)
class LatentSpec:
    """The plan of the wrappers.

    Attributes
    ----------
    latent, rotary : int
        Columns of the two rows of a token.
    own, values : int
        Columns of a head's keys without the rotary ones, and of its values.
    scale : float
        Factor of the logits.
    """

    heads: int
    latent: int
    rotary: int
    own: int
    values: int
    scale: float

    plans_rows = False

    def wrapper(
        self, settings: Settings, decodes: bool, graph: Table | None = None
    ) -> LatentWrappers:
        """For steps in which every request decodes, or for others; `graph`: its buffers."""
        if settings.kv_dtype != settings.dtype:
            raise ValueError(f"`kv_dtype` must be {settings.dtype} for latent attention here")
        buffers: dict[str, Any] = {
            "use_cuda_graph": True,
            "qo_indptr": torch.empty_like(graph.qo_indptr),
            "kv_indptr": graph.kv_indptr,
            "kv_indices": graph.kv_indices,
            "kv_len_arr": torch.empty_like(graph.lengths),
        } if graph is not None else {}  # fmt: skip
        absorbed = kernels.mla.BatchMLAPagedAttentionWrapper(settings.workspace, **buffers)
        if decodes:
            return LatentWrappers(absorbed, None)
        expanded = kernels.BatchPrefillWithRaggedKVCacheWrapper(
            settings.workspace, backend=settings.backend
        )
        return LatentWrappers(absorbed, expanded)

    def plan(
        self,
        wrapper: LatentWrappers,
        settings: Settings,
        host: Table,
        kv_indices: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        """Once a step; see `AttentionSpec.plan`."""
        count = len(starts) - 1
        lengths, ends = host.lengths[:count], host.kv_indptr[: count + 1]
        new = starts.diff()
        if wrapper.expanded is None or bool((new == 1).all()):
            wrapper.decoding, wrapper.prompts = slice(None), None
            self._plan_absorbed(wrapper, settings, starts, ends, kv_indices, lengths)
            return
        one = new == 1
        rows = torch.arange(int(starts[-1]))
        short = one.repeat_interleave(new.long())
        device = kv_indices.device
        wrapper.decoding = rows[short].to(device) if bool(one.any()) else None
        wrapper.prompts = rows[~short].to(device)
        if wrapper.decoding is not None:
            pages = _pages_of(host, ends, one)
            counts = torch.cat([p.new_tensor([len(p)]) for p in pages])
            self._plan_absorbed(
                wrapper,
                settings,
                _ends(new[one]),
                _ends(counts),
                torch.cat(pages).to(device),
                lengths[one],
            )
        size = settings.page_size
        keys = []
        for pages, length in zip(_pages_of(host, ends, ~one), lengths[~one], strict=True):
            position = torch.arange(int(length))
            keys.append(pages[position // size].long() * size + position % size)
        wrapper.keys = torch.cat(keys).to(device)
        wrapper.expanded.plan(
            _ends(new[~one]),
            _ends(lengths[~one]),
            self.heads,
            self.heads,
            self.own + self.rotary,
            self.values,
            causal=True,
            sm_scale=self.scale,
            q_data_type=settings.dtype,
            kv_data_type=settings.dtype,
        )

    def _plan_absorbed(
        self, wrapper: LatentWrappers, settings: Settings, *tables: torch.Tensor
    ) -> None:
        wrapper.absorbed.plan(
            *tables,
            self.heads,
            self.latent,
            self.rotary,
            settings.page_size,
            False,
            self.scale,
            settings.dtype,
            settings.dtype,
        )


def _ends(counts: torch.Tensor) -> torch.Tensor:
    """Where parts begin and end that have so many elements, int32."""
    zero = torch.zeros(1, dtype=torch.int32)
    return torch.cat([zero, counts.cumsum(0).int()])


def _pages_of(host: Table, ends: torch.Tensor, chosen: torch.Tensor) -> list[torch.Tensor]:
    """Pages of each of the chosen requests."""
    numbers = chosen.nonzero()[:, 0].tolist()
    return [host.kv_indices[int(ends[n]) : int(ends[n + 1])] for n in numbers]


@dataclass
class LatentAttention(Body):
    """Latent attention.

    Attributes
    ----------
    spec : LatentSpec
        Its wrappers.
    inputs : Product
        The queries' first product (or the queries) and the two rows of the cache, in one.
    query_norm, query : Norm and Product, or None
        From the queries' first product to queries, where there are two.
    latent_norm : Norm
        Norm of the latent row.
    up : torch.Tensor
        ``[heads, own + values, latent]``: from the latent row to keys and values.
    output : Product
        The last product.
    rope : Rope
        Rotation of the rotary columns.
    """

    spec: LatentSpec = field()  # not the default of `Body`
    inputs: Product
    query_norm: Norm | None
    query: Product | None
    latent_norm: Norm
    up: torch.Tensor
    output: Product
    rope: Rope

    @staticmethod
    def cuts() -> Cuts:
        """Heads are divided; all ranks have the cache's rows and the queries' first product."""
        return {
            "q_a_proj": WHOLE, "kv_a_proj_with_mqa": WHOLE, "q_proj": ROWS, "q_b_proj": ROWS,
            "kv_b_proj": ROWS, "o_proj": COLUMNS,
        }  # fmt: skip

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        return (page_size, self.spec.latent + self.spec.rotary)

    @property
    def takes_codes(self) -> bool:
        return isinstance(self.inputs, Fp8Blocks)

    def __call__(self, x: torch.Tensor | Codes, batch: Batch, cache: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        first = self.inputs(x)
        row = spec.latent + spec.rotary
        q, latent, turned = first.split([first.shape[1] - row, spec.latent, spec.rotary], 1)
        if self.query is not None and self.query_norm is not None:
            q = self._queries(self.query, self.query_norm, q)
        q = q.view(len(x), spec.heads, spec.own + spec.rotary)
        own, turning = q[..., : spec.own], q[..., spec.own :].contiguous()
        turned = turned.contiguous()
        self.rope(batch.rotations, turning, turned[:, None], spec.rotary)
        self._append(self.latent_norm(latent.contiguous()), turned, batch, cache)
        return self.output(self._attend(own, turning, batch, cache).flatten(1))

    def parts(
        self, x: torch.Tensor, batch: LaterBatch, cache: torch.Tensor
    ) -> list[Callable[[], Any]]:
        spec = self.spec
        latent, turned = x.new_zeros(len(x), spec.latent), x.new_zeros(len(x), spec.rotary)
        turning = x.new_zeros(len(x), spec.heads, spec.rotary)
        own = x.new_zeros(len(x), spec.heads, spec.own)
        parts = [
            lambda: self.inputs(x),
            lambda: self.output(x.new_zeros(len(x), self.output.inputs)),
            lambda: self.rope(batch().rotations, turning, turned[:, None], spec.rotary),
            lambda: self.latent_norm(latent),
            lambda: self._append(latent, turned, batch(), cache),
            lambda: self._attend(own, turning, batch(), cache),
        ]
        if self.query is not None and self.query_norm is not None:
            query, norm = self.query, self.query_norm
            parts.insert(0, lambda: self._queries(query, norm, x.new_zeros(len(x), query.inputs)))
        return parts

    def _append(
        self, latent: torch.Tensor, turned: torch.Tensor, batch: Batch, cache: torch.Tensor
    ) -> None:
        """The two rows of each token to its page."""
        kernels.append_paged_mla_kv_cache(
            latent,
            turned,
            batch.batch_indices,
            batch.positions,
            *cache.split([self.spec.latent, self.spec.rotary], -1),
            batch.kv_indices,
            batch.kv_indptr,
            batch.kv_last_page_len,
        )

    @staticmethod
    def _queries(query: Product, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        """Queries of their first product's rows."""
        if isinstance(query, Fp8Blocks) and norm.rounds:
            return query(norm.rounded(x))
        return query(norm(x.contiguous()))

    def _attend(
        self, own: torch.Tensor, turning: torch.Tensor, batch: Batch, cache: torch.Tensor
    ) -> torch.Tensor:
        """Attention of queries, whose rotary columns are `turning`, to what the cache has."""
        spec, wrappers = self.spec, batch.attention[self.spec]
        out = own.new_empty(len(own), spec.heads, spec.values)
        if (rows := wrappers.decoding) is not None:
            rest = cache.split([spec.latent, spec.rotary], -1)
            out[rows] = self._absorbed(own[rows], turning[rows], wrappers.absorbed, *rest)
        if (rows := wrappers.prompts) is not None:
            keys = cache.flatten(0, 1)[wrappers.keys]
            out[rows] = self._expanded(own[rows], turning[rows], wrappers, keys)
        return out

    def _absorbed(
        self,
        own: torch.Tensor,
        turning: torch.Tensor,
        wrapper: Any,
        latents: torch.Tensor,
        rotaries: torch.Tensor,
    ) -> torch.Tensor:
        to_keys, to_values = self.up.split([self.spec.own, self.spec.values], 1)
        q = torch.bmm(own.transpose(0, 1), to_keys).transpose(0, 1)
        out = wrapper.run(q, turning, latents, rotaries)
        return torch.bmm(out.transpose(0, 1), to_values.mT).transpose(0, 1)

    def _expanded(
        self,
        own: torch.Tensor,
        turning: torch.Tensor,
        wrappers: LatentWrappers,
        cached: torch.Tensor,
    ) -> torch.Tensor:
        spec = self.spec
        latent, turned = cached.split([spec.latent, spec.rotary], 1)
        both = (latent @ self.up.flatten(0, 1).t()).unflatten(1, (spec.heads, -1))
        key, value = both.split([spec.own, spec.values], -1)
        key = torch.cat([key, turned[:, None].expand(-1, spec.heads, -1)], -1)
        return wrappers.expanded.run(torch.cat([own, turning], -1), key, value.contiguous())
