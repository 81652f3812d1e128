"""Reads the arguments of latent attention in one call, and launches planner and kernel."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from .._attention.checks import scalar
from .._common.checks import count as check_count
from .._common.checks import named
from .._common.checks import tensor as check_tensor
from .._common.driver import get_device_sm_count, get_stream_sm_count
from .._common.dtypes import HALF, check_dtype, torch_name
from ..jit.attention.mla import (
    FLOAT8,
    get_mla_device_plan_module,
    get_mla_module_of,
    mla_plan_size,
)
from .problem import MlaOptions, factor, read_options
from .wrapper import BatchMLAPagedAttentionWrapper

_LN_2 = math.log(2.0)

_NAMES = {
    **dict.fromkeys(("q_nope", "q_pe"), "query"),
    **dict.fromkeys(("ckv_cache", "kpe_cache"), "kv_cache"),
    **dict.fromkeys(("int_workspace_buffer", "float_workspace_buffer"), "workspace_buffer"),
    "kv_indices": "block_tables",
    "sm_scale": "bmm1_scale",
}
"""Arguments of the function by the wrapper's and the kernel's names."""

SCALED_TOKEN_BYTES = 656
"""512 e4m3 columns, a float32 scale for each 128 of them, 64 bfloat16 columns."""


@dataclass(frozen=True)
class PageRows:
    """Page numbers and lengths of requests, one row of `pages` for each.

    Attributes
    ----------
    pages : torch.Tensor
        int32 ``[num_requests, width]``, rows contiguous.
    kv_lens : torch.Tensor
        int32 ``[num_requests / sharers]``: `sharers` requests of one query token share an entry.
    qo_indptr : torch.Tensor or None
        First query token of each request; None: each has `max_q_len`.
    """

    pages: torch.Tensor
    kv_lens: torch.Tensor
    qo_indptr: torch.Tensor | None
    max_q_len: int
    sharers: int
    causal: bool

    def flat_pages(self) -> torch.Tensor:
        """All rows as a vector, with what lies between them."""
        count, width = self.pages.shape
        length = 0 if count == 0 else (count - 1) * self.pages.stride(0) + width
        return self.pages.as_strided((length,), (1,))

    def host_lists(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First query tokens and KV lengths of requests, on the host."""
        lengths = self.kv_lens.cpu().int()
        if self.sharers > 1:
            hidden = torch.arange(self.sharers - 1, -1, -1)
            lengths = (lengths[:, None] - hidden).clamp(min=0).reshape(-1).int()
        if self.qo_indptr is not None:
            return self.qo_indptr.cpu(), lengths
        first = torch.arange(len(self.pages) + 1, dtype=torch.int32) * self.max_q_len
        return first, lengths


@dataclass(frozen=True)
class OneCall:
    """Tensors of one call: queries and outputs ``[tokens, heads, columns]``, and a paged cache."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    dims: tuple[int, int]
    scales: tuple[float, float]
    sinks: torch.Tensor | None
    out: torch.Tensor
    out_shape: torch.Size

    @property
    def is_scaled(self) -> bool:
        """Whether tokens hold scales of groups of columns."""
        return self.kv_cache.dtype == torch.uint8

    def parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        at, rope = self.dims
        if tensor.dtype == torch.uint8:
            return tensor[..., :at].view(FLOAT8), tensor[..., -2 * rope :].view(torch.bfloat16)
        return tensor[..., :at], tensor[..., at:] if rope else None

    def with_plain_cache(self) -> OneCall:
        """The same with a cache in the type of queries, scales multiplied in."""
        latent, rotary = self.parts(self.kv_cache)
        assert rotary is not None
        scales = self.kv_cache[..., self.dims[0] : -2 * self.dims[1]].view(torch.float32)
        latent = latent.float() * scales.repeat_interleave(128, -1)
        plain = torch.cat([latent.to(self.query.dtype), rotary.to(self.query.dtype)], -1)
        return dataclasses.replace(self, kv_cache=plain)

    def with_single_tokens(self) -> OneCall:
        """The same with pages of one token."""
        cache = self.kv_cache
        if cache.shape[0] > 1 and cache.stride(0) != cache.shape[1] * cache.stride(1):
            raise ValueError(
                "`kv_cache` must have its pages one after the other for `sparse_mla_top_k`, got "
                f"strides {list(cache.stride())}"
            )
        return dataclasses.replace(self, kv_cache=cache.flatten(0, 1)[:, None])

    def options(self, causal: bool) -> MlaOptions:
        return read_options(
            num_heads=self.query.shape[1],
            head_dim_ckv=self.dims[0],
            head_dim_kpe=self.dims[1],
            page_size=self.kv_cache.shape[1],
            causal=causal,
            sm_scale=self.scales[0],
            q_data_type=self.query.dtype,
            kv_data_type=FLOAT8 if self.is_scaled else self.kv_cache.dtype,
            output_dtype=self.out.dtype,
            lse_mode="none",
        )

    def run(
        self,
        table: PageRows,
        workspace: torch.Tensor,
        backend: str,
        enable_pdl: bool | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        base: str | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if lse is None and return_lse:
            shape = self.query.shape[:2]
            lse = torch.empty(shape, dtype=torch.float32, device=self.query.device)
        try:
            if table.kv_lens.is_cuda:
                options = self.options(table.causal)
                self._run_planned_there(options, table, workspace, backend, enable_pdl, lse, base)
            else:
                call = self.with_plain_cache() if self.is_scaled else self
                options = call.options(table.causal)
                call._run_planned_here(options, table, workspace, backend, enable_pdl, lse, base)
        except (TypeError, ValueError):
            with named(**_NAMES):
                raise
        return self.out.view(self.out_shape), lse

    def _run_planned_there(
        self,
        options: MlaOptions,
        table: PageRows,
        workspace: torch.Tensor,
        backend: str,
        enable_pdl: bool | None,
        lse: torch.Tensor | None,
        base: str | None,
    ) -> None:
        """With the plan made on the device, by the kernel's CTAs or by a launch before it."""
        config = options.config(backend, self.query.device, table.max_q_len)
        if self.is_scaled:
            config = dataclasses.replace(
                config, dtype_kpe=torch.bfloat16, scaled_groups=True, tile_rows=64
            )
        run = get_mla_module_of(config).mla_run
        plan = torch.empty(mla_plan_size(), dtype=torch.uint8)
        raw = workspace.view(-1).view(torch.uint8)
        count, width = table.pages.shape
        sizes = len(self.query), table.max_q_len, options.num_heads, self.dims[0], options.page_size
        begin = get_mla_device_plan_module().mla_device_plan(
            plan,
            raw,
            _counters_of(raw) if config.backend == "fa3" else None,
            table.kv_lens,
            table.qo_indptr,
            (count, width, table.pages.stride(0), table.sharers),
            (*sizes, get_stream_sm_count(raw.device)),
            table.causal,
            enable_pdl,
        )
        run(
            plan,
            (raw, raw[begin:]),
            self.parts(self.query),
            (*self.parts(self.kv_cache), table.flat_pages()),
            self.out,
            lse,
            self.sinks,
            (*self.scales, _LN_2 if base == "basee" else 1.0, 1.0),
            None,
            enable_pdl,
        )

    def _run_planned_here(
        self,
        options: MlaOptions,
        table: PageRows,
        workspace: torch.Tensor,
        backend: str,
        enable_pdl: bool | None,
        lse: torch.Tensor | None,
        base: str | None,
    ) -> None:
        """By the wrapper, whose planner reads lengths on the host."""
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        first, lengths = table.host_lists()
        wrapper.plan(
            num_heads=options.num_heads,
            head_dim_ckv=self.dims[0],
            head_dim_kpe=self.dims[1],
            page_size=options.page_size,
            causal=options.causal,
            sm_scale=options.sm_scale,
            q_data_type=options.q_dtype,
            kv_data_type=options.kv_dtype,
            cum_seq_lens_q=first,
            block_tables=table.pages,
            seq_lens=lengths.clamp(max=table.pages.shape[1] * options.page_size),
            output_dtype=options.o_dtype,
            scale_mode="bmm-scalar",
            enable_pdl=enable_pdl,
        )
        q_nope, q_pe = self.parts(self.query)
        ckv, kpe = self.parts(self.kv_cache)
        wrapper.run(
            q_nope,
            q_pe,
            ckv,
            kpe,
            out=self.out,
            lse=lse,
            return_lse_base_on_e=base == "basee",
            sinks=self.sinks,
            bmm2_scale=self.scales[1],
        )


_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def _counters_of(workspace: torch.Tensor) -> torch.Tensor | None:
    """Zeros that launches with this workspace leave as zeros; None: a launch before must plan.

    The workspace itself may hold anything, and to clear a part of it would be a launch. What a
    capture records is not done yet, so that zeros are first made outside.
    """
    key = workspace.device, workspace.data_ptr()
    found = _counters.get(key)
    if found is None and not torch.cuda.is_current_stream_capturing():
        count = 2 * get_device_sm_count(workspace.device)
        found = _counters[key] = torch.zeros(count, dtype=torch.int32, device=workspace.device)
    return found


def read_one_call(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    dims: tuple[int, int],
    bmm1_scale: Any,
    bmm2_scale: Any,
    sinks: Any,
    out: torch.Tensor | None,
) -> OneCall:
    """Queries, cache, scales and output, checked as far as the kernel's binding does not."""
    dims = (check_count("kv_lora_rank", dims[0]), check_count("qk_rope_head_dim", dims[1], 0))
    check_tensor("query", query, 3, 4)
    check_tensor("kv_cache", kv_cache, 3, 4)
    if kv_cache.ndim == 4:
        if 1 not in kv_cache.shape[1:3]:
            raise ValueError(
                "`kv_cache` must have one head, in its second or third dimension, got shape "
                f"{list(kv_cache.shape)}"
            )
        kv_cache = kv_cache.squeeze(1 if kv_cache.shape[1] == 1 else 2)
    if query.shape[-2] == 0:
        raise ValueError(f"`query` must have a head, got shape {list(query.shape)}")
    if kv_cache.dtype == torch.uint8:
        _check_scaled(kv_cache, dims)
    for name, tensor in (("query", query), ("kv_cache", kv_cache)):
        if tensor.shape[-1] != sum(dims) and tensor.dtype != torch.uint8:
            raise ValueError(
                f"`{name}` must have {sum(dims)} columns for `kv_lora_rank` and "
                f"`qk_rope_head_dim`, got shape {list(tensor.shape)}"
            )
    types = (torch.float16, torch.bfloat16, FLOAT8)
    if query.dtype not in types or kv_cache.dtype not in (query.dtype, FLOAT8, torch.uint8):
        raise ValueError(
            "`query` must be float16 or bfloat16, and `kv_cache` of its dtype, float8_e4m3fn or "
            f"uint8, got {torch_name(query.dtype)} and {torch_name(kv_cache.dtype)}"
        )
    if isinstance(sinks, (list, tuple)) and len(sinks) == 1:
        sinks = sinks[0]
    if sinks is not None:
        check_tensor("sinks", sinks, 1)
    out_shape = torch.Size([*query.shape[:-1], dims[0]])
    if out is None:
        dtype = torch.bfloat16 if query.dtype == FLOAT8 else query.dtype
        out = torch.empty(out_shape, dtype=dtype, device=query.device)
    elif check_tensor("out", out).shape != out_shape or not out.is_contiguous():
        raise ValueError(
            f"`out` must be contiguous with shape {list(out_shape)}, got {list(out.shape)} with "
            f"strides {list(out.stride())}"
        )
    else:
        check_dtype("out", out.dtype, HALF)
    scales = (factor("bmm1_scale", bmm1_scale), scalar("bmm2_scale", bmm2_scale))
    rows = query if query.ndim == 3 else query.flatten(0, 1)
    return OneCall(rows, kv_cache, dims, scales, sinks, out.view(-1, *out_shape[-2:]), out_shape)


def _check_scaled(kv_cache: torch.Tensor, dims: tuple[int, int]) -> None:
    is_aligned = kv_cache.data_ptr() % 16 == 0 and kv_cache.stride(-1) == 1
    strides_fit = all(stride % 16 == 0 for stride in kv_cache.stride()[:-1])
    if dims != (512, 64) or kv_cache.shape[-1] != SCALED_TOKEN_BYTES:
        raise ValueError(
            f"`kv_cache` of uint8 must have {SCALED_TOKEN_BYTES} bytes a token, for `kv_lora_rank` "
            f"512 and `qk_rope_head_dim` 64, got shape {list(kv_cache.shape)} and {dims}"
        )
    if not is_aligned or not strides_fit:
        raise ValueError("`kv_cache` of uint8 must have its tokens at multiples of 16 bytes")


def _lengths(name: str, value: Any, count: int) -> torch.Tensor:
    tensor = check_tensor(name, value, 1)
    if tensor.dtype != torch.int32 or len(tensor) != count or not tensor.is_contiguous():
        raise ValueError(
            f"`{name}` must be contiguous int32 [{count}], got {torch_name(tensor.dtype)} "
            f"{list(tensor.shape)}"
        )
    return tensor


def _batch_size(query: torch.Tensor, cum_seq_lens_q: Any) -> int:
    if query.ndim == 4:
        return len(query)
    return max(len(check_tensor("cum_seq_lens_q", cum_seq_lens_q, 1)) - 1, 0)


def read_table(
    query: torch.Tensor,
    block_tables: Any,
    seq_lens: Any,
    cum_seq_lens_q: Any,
    max_q_len: int | None,
) -> PageRows:
    """Requests of the call."""
    if (cum_seq_lens_q is None) != (query.ndim == 4):
        raise ValueError(
            "`query` must have 3 dimensions with `cum_seq_lens_q` and 4 without it, got shape "
            f"{list(query.shape)}"
        )
    batch_size = _batch_size(query, cum_seq_lens_q)
    if cum_seq_lens_q is None:
        q_len = query.shape[1]
        if max_q_len is not None:
            check_count("max_q_len", max_q_len, q_len)
    else:
        _lengths("cum_seq_lens_q", cum_seq_lens_q, batch_size + 1)
        q_len = check_count("max_q_len", max_q_len)
    lengths = _lengths("seq_lens", seq_lens, batch_size)
    check_tensor("block_tables", block_tables)
    if (
        block_tables.dtype != torch.int32
        or block_tables.ndim != 2
        or len(block_tables) != batch_size
        or (block_tables.shape[1] > 1 and block_tables.stride(1) != 1)
    ):
        raise ValueError(
            f"`block_tables` must be int32 [{batch_size}, max_pages] with contiguous rows, got "
            f"{torch_name(block_tables.dtype)} {list(block_tables.shape)} with strides "
            f"{list(block_tables.stride())}"
        )
    return PageRows(block_tables, lengths, cum_seq_lens_q, q_len, 1, True)


def read_top_k(
    call: OneCall,
    query: torch.Tensor,
    indices: Any,
    seq_lens: Any,
    cum_seq_lens_q: Any,
    top_k: int,
    top_k_lens: Any,
) -> PageRows:
    """Each query token is a request, whose pages are tokens."""
    tokens, sharers = len(call.query), 1
    if check_tensor("block_tables", indices, 2, 3).ndim == 3:
        if query.ndim == 4 and indices.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"`block_tables` must be int32 {[*query.shape[:2], top_k]} for these queries, got "
                f"{list(indices.shape)}"
            )
        indices = indices.flatten(0, 1)
    if (
        indices.dtype != torch.int32
        or list(indices.shape) != [tokens, top_k]
        or (top_k > 1 and indices.stride(1) != 1)
    ):
        raise ValueError(
            f"`block_tables` must be int32 with {top_k} contiguous entries for each of {tokens} "
            f"query tokens, got {torch_name(indices.dtype)} {list(indices.shape)} with strides "
            f"{list(indices.stride())}"
        )
    if top_k_lens is not None:
        lengths = _lengths("sparse_mla_top_k_lens", top_k_lens, tokens)
        if seq_lens is not None:  # nobody reads them, but wrong ones are a mistake of the caller
            _lengths("seq_lens", seq_lens, _batch_size(query, cum_seq_lens_q))
    elif query.ndim == 3:
        raise ValueError("`sparse_mla_top_k_lens` must be given with `cum_seq_lens_q`")
    else:
        sharers = max(query.shape[1], 1)
        lengths = _lengths("seq_lens", seq_lens, query.shape[0])[: tokens // sharers]
    return PageRows(indices, lengths, None, 1, sharers, False)
