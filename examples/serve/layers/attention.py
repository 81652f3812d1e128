"""Attention over pages of keys and values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from .. import kernels
from ..batch import Batch
from ..invariance import ATTENTION, in_tiles, padded
from .body import Body, LaterBatch
from .division import COLUMNS, ROWS, Cut, Cuts
from .linear import BLOCK, Codes, Fp8Blocks, Product, Sum, norm_parts, sum_parts, takes_sums
from .norm import Norm

if TYPE_CHECKING:
    from ..table import Settings, Table


MOST_ROWS = 16  # of a KV head, of which the package makes codes


@dataclass(frozen=True)
class AttentionSpec:
    """What a wrapper is planned for; layers with equal ones share it.

    Attributes
    ----------
    window : int
        How many keys before its own position a query sees; -1: all.
    scale : float or None
        Factor of the logits; None: ``dim ** -0.5``.
    soft_cap : float
        Bound of the logits; 0: none.
    sinks : bool
        Whether each head has one more logit, without a value.
    rounds : bool
        Whether results of steps in which every request decodes are `Codes`.
    """

    heads: int
    kv_heads: int
    dim: int
    window: int = -1
    scale: float | None = None
    soft_cap: float = 0.0
    sinks: bool = False
    rounds: bool = False

    @property
    def plans_rows(self) -> bool:
        """Whether the wrapper of a graph plans rows beyond the batch."""
        return self.sinks

    def wrapper(self, settings: Settings, decodes: bool, graph: Table | None = None) -> Any:
        """For steps in which every request decodes, or for others; `graph`: its buffers."""
        # The kernel for decoding adds in another order than that for prompts, and has no sinks.
        if decodes and not settings.batch_invariant and not self.sinks:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": graph.kv_indptr,
                "paged_kv_indices_buffer": graph.kv_indices,
                "paged_kv_last_page_len_buffer": graph.last_page_len,
            } if graph is not None else {}  # fmt: skip
            return kernels.BatchDecodeWithPagedKVCacheWrapper(settings.workspace, **buffers)
        buffers = {
            "use_cuda_graph": True,
            "qo_indptr_buf": torch.empty_like(graph.qo_indptr),  # not the batch's: see `_replay`
            "paged_kv_indptr_buf": graph.kv_indptr,
            "paged_kv_indices_buf": graph.kv_indices,
            "paged_kv_last_page_len_buf": graph.last_page_len,
        } if graph is not None else {}  # fmt: skip
        if self.sinks:
            return kernels.BatchAttentionWithAttentionSinkWrapper(
                settings.workspace,
                q_data_type=settings.dtype,
                kv_data_type=settings.kv_dtype,
                head_dim_qk=self.dim,
                head_dim_vo=self.dim,
                window_left=self.window,
                backend=settings.backend,
                **buffers,
            )
        return kernels.BatchPrefillWithPagedKVCacheWrapper(
            settings.workspace, backend=settings.backend, **buffers
        )

    def plan(
        self,
        wrapper: Any,
        settings: Settings,
        host: Table,
        kv_indices: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        """Once a step; what the planner reads is on the host, page numbers are on the device.

        `starts`: first row of each request that is planned, and the end.
        """
        count = len(starts) - 1
        prompts = self.sinks or not _decodes(wrapper)
        wrapper.plan(
            *((starts,) if prompts else ()),
            host.kv_indptr[: count + 1],
            kv_indices,
            host.last_page_len[:count],
            self.heads,
            self.kv_heads,
            self.dim,
            settings.page_size,
            window_left=self.window,
            q_data_type=settings.dtype,
            kv_data_type=settings.kv_dtype,
            o_data_type=torch.float8_e4m3fn if self.rounds and not prompts else settings.dtype,
            **({"sm_scale": self.scale} if self.scale is not None else {}),
            **({"logits_soft_cap": self.soft_cap} if self.soft_cap else {}),
            **({"causal": True} if prompts else {}),
            **(ATTENTION if settings.batch_invariant else {}),
        )


def _decodes(wrapper: Any) -> bool:
    return isinstance(wrapper, kernels.BatchDecodeWithPagedKVCacheWrapper)


@functools.cache
def _makes_codes(wrapper: type) -> bool:
    """Whether the package's attention for decoding writes results of 8 bits with their scales."""
    return "out_scale" in inspect.signature(wrapper.run).parameters


@dataclass
class Rope:
    """Rotary embedding of the first columns of each head.

    Attributes
    ----------
    cos_sin : torch.Tensor
        ``[positions, columns]`` float32: cosines and sines.
    halves : bool
        Whether a pair is an element of the first half and one of the second, or two neighbours.
    """

    cos_sin: torch.Tensor
    halves: bool = True

    def __call__(
        self, rotations: torch.Tensor, q: torch.Tensor, k: torch.Tensor, head_dim: int
    ) -> None:
        kernels.apply_rope_with_cos_sin_cache_inplace(
            rotations, q, k, head_dim, self.cos_sin, is_neox=self.halves
        )


@dataclass
class Attention(Body):
    """Grouped-query attention.

    Attributes
    ----------
    spec : AttentionSpec
        Its wrapper.
    qkv, output : Product
        Queries, keys and values in one, and what follows.
    rope : Rope or None
        Rotation of queries and keys; None: positions count only by the mask.
    q_norm, k_norm : Norm or None
        Norms of each head, before.
    sinks : torch.Tensor or None
        ``[heads]`` float32, if the spec has them.
    gated : bool
        Whether a head's queries are followed by a gate, whose sigmoid multiplies the result.
    k_scale, v_scale : float
        Factors of the keys and values of an 8-bit cache.
    """

    spec: AttentionSpec = field()  # not the default of `Body`
    qkv: Product
    output: Product
    rope: Rope | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: torch.Tensor | None = None
    gated: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    invariant = True

    def __post_init__(self) -> None:
        spec = self.spec
        rounds = (
            isinstance(self.output, Fp8Blocks)
            and not (self.gated or spec.sinks)
            and spec.dim == BLOCK
            and spec.heads <= MOST_ROWS * spec.kv_heads
            and _makes_codes(kernels.BatchDecodeWithPagedKVCacheWrapper)
        )
        self.spec = replace(spec, rounds=rounds)

    @staticmethod
    def cuts(kv_heads: int) -> Cuts:
        """Heads are divided; where ranks are more than `kv_heads`, several have the same one."""
        shared = Cut(0, units=kv_heads)
        return {
            "q_proj": ROWS, "k_proj": shared, "v_proj": shared, "o_proj": COLUMNS, "sinks": ROWS,
        }  # fmt: skip

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        return (2, page_size, self.spec.kv_heads, self.spec.dim)

    @property
    def takes_codes(self) -> bool:
        return isinstance(self.qkv, Fp8Blocks)

    @property
    def takes_sums(self) -> bool:
        return takes_sums(self.qkv)

    def __call__(
        self, x: torch.Tensor | Codes | Sum, batch: Batch, cache: torch.Tensor
    ) -> torch.Tensor:
        return in_tiles(batch.tile, self.output, self.before_last(x, batch, cache))

    @property
    def last(self) -> Product:
        return self.output

    def before_last(
        self, x: torch.Tensor | Codes | Sum, batch: Batch, cache: torch.Tensor
    ) -> torch.Tensor | Codes:
        if isinstance(x, Sum) and self._is_one_kernel:
            q = self._project_and_place(x, batch, cache)
            gate = q[:, :0]
        else:
            q, k, v, gate = in_tiles(batch.tile, self._project, x)
            q = self._place(q, k, v, batch, cache)
        out = self._attend(q, batch, cache)
        return out if isinstance(out, Codes) else self._gate(out, gate)

    def parts(
        self, x: torch.Tensor, batch: LaterBatch, cache: torch.Tensor
    ) -> list[Callable[[], Any]]:
        spec, rows = self.spec, len(x)
        q = x.new_zeros(rows, spec.heads, spec.dim)
        k = x.new_zeros(rows, spec.kv_heads, spec.dim)
        gate = q if self.gated else q[:, :0]

        def place(row: Sum) -> torch.Tensor:
            return self._project_and_place(row, batch(), cache)

        turn = [] if self._is_fused else [lambda: self._turn(q, k, batch().rotations)]
        return [
            lambda: self.qkv(x),
            *sum_parts(self.qkv, x, place if self._is_one_kernel else None),
            *turn,
            lambda: self._place(q, k, k, batch(), cache),
            lambda: self.output(self._gate(q.flatten(1), gate)),
            *norm_parts(self.output, q.flatten(1), x),
            lambda: self._attend(q, batch(), cache),
        ]

    def _project(
        self, x: torch.Tensor | Codes | Sum
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values and gates of normalised rows."""
        heads, kv_heads, dim = self.spec.heads, self.spec.kv_heads, self.spec.dim
        widths = [heads * (1 + self.gated), kv_heads, kv_heads]
        q, k, v = self.qkv(x).view(len(x), sum(widths), dim).split(widths, dim=1)
        gate = q[:, :0]
        if self.gated:
            q, gate = (part.contiguous() for part in q.view(len(x), heads, 2, dim).unbind(2))
        return q, k, v, gate

    @property
    def _norms(self) -> list[Norm]:
        return [norm for norm in (self.q_norm, self.k_norm) if norm is not None]

    @property
    def _is_fused(self) -> bool:
        """Whether one kernel norms and turns heads, and appends keys and values."""
        norms = self._norms
        return (
            self.rope is not None
            and self.rope.cos_sin.shape[1] == self.spec.dim
            and not any(norm.plus_one for norm in norms)
            and (not norms or self.spec.dim in (16, 32, 64, 128, 256, 512))
            and hasattr(kernels.rope, "rope_append_paged_kv_cache")
        )

    @property
    def _is_one_kernel(self) -> bool:
        """Whether the product of a `Sum` does what `_place` does, too."""
        makes = getattr(self.qkv, "makes_heads", None)
        return self._is_fused and not self.gated and makes is not None and makes(self.spec.dim)

    def _project_and_place(self, x: Sum, batch: Batch, cache: torch.Tensor) -> torch.Tensor:
        """Queries of one row; its keys and values are in their pages."""
        assert self.rope is not None
        weights = [None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)]
        rounds = cache.dtype != x.x.dtype
        return self.qkv.heads(
            x,
            self.rope.cos_sin,
            batch.rotations,
            cache.unbind(1),
            *(batch.kv_indices, batch.kv_indptr, batch.batch_indices, batch.positions),
            *weights,
            head_eps=self._norms[0].eps if self._norms else 0.0,
            is_neox=self.rope.halves,
            quant_scale_k=1 / self.k_scale if rounds else 1.0,
            quant_scale_v=1 / self.v_scale if rounds else 1.0,
        )

    def _place(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        """Keys and values to their pages; queries with norm and position, perhaps in place."""
        slots = batch.kv_indices, batch.kv_indptr
        if self.rope is not None and self._is_fused:
            rounds = cache.dtype != q.dtype
            weights = [None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)]
            kernels.rope.rope_append_paged_kv_cache(
                *(q, k, v),
                self.rope.cos_sin,
                batch.rotations,
                cache.unbind(1),
                *slots,
                batch.batch_indices,
                batch.positions,
                *weights,
                self._norms[0].eps if self._norms else 0.0,
                is_neox=self.rope.halves,
                quant_scale_k=1 / self.k_scale if rounds else 1.0,
                quant_scale_v=1 / self.v_scale if rounds else 1.0,
                page_size=cache.shape[2],
            )
            return q
        q, k = in_tiles(batch.tile, self._turn, q, k, batch.rotations)
        kernels.append_paged_kv_cache(
            as_cached(k, cache.dtype, self.k_scale),
            as_cached(v, cache.dtype, self.v_scale),
            batch.batch_indices,
            batch.positions,
            cache,
            *slots,
            batch.kv_last_page_len,
        )
        return q

    def _turn(
        self, q: torch.Tensor, k: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys with their norms and positions; perhaps in place."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            self.rope(rotations, q, k, self.spec.dim)
        return q, k

    def _attend(self, q: torch.Tensor, batch: Batch, cache: torch.Tensor) -> torch.Tensor | Codes:
        scales = {}
        if (self.k_scale, self.v_scale) != (1.0, 1.0) and cache.dtype.itemsize == 1:
            scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        sinks = ()
        if self.sinks is not None:
            scale = self.spec.dim**-0.5 if self.spec.scale is None else self.spec.scale
            sinks = (self.sinks, scale)
        wrapper = batch.attention[self.spec]
        if self.spec.rounds and _decodes(wrapper):
            codes, _ = Codes.empty(len(q), self.spec.heads * BLOCK, q.device)
            out = codes.numbers.view(q.shape)
            wrapper.run(q, cache, out=out, out_scale=codes.scales, **scales)
            return codes
        out = wrapper.run(q[: batch.attended], cache, *sinks, **scales)
        return padded(out.flatten(1), len(q))

    def _gate(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return out * gate.flatten(1).sigmoid() if self.gated else out


def as_cached(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Keys and values as the cache has them; 8-bit ones saturate, a cast alone would give NaN."""
    if x.dtype == dtype:
        return x
    limit = torch.finfo(dtype).max
    return (x / scale if scale != 1.0 else x).clamp(-limit, limit).to(dtype)
