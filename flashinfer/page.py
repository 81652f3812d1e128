"""Paged key-value caches: appending new tokens, and the index tensors that this takes.

A cache is a pool of pages of `page_size` slots. Request ``b`` owns the pages
``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``, in order; its token at position ``p`` is in the
request's page ``p // page_size`` at slot ``p % page_size``.
"""

from typing import Any, cast

import torch

from ._common import checks
from ._common.cache_layout import is_hnd, of_pages, split_cache
from ._common.conversions import converted
from ._common.kernels import NOT_LOADED, Kernel, KernelTable
from ._common.numbers import plain
from ._instrument.decorator import flashinfer_api
from .jit.page import gen_page_module
from .jit.quantization import KVFloat4Config, gen_kv_float4_module
from .trace.templates.kv_float4 import (
    nvfp4_quantize_append_paged_kv_cache_trace,
    nvfp4_quantize_append_slots_trace,
)
from .trace.templates.page import (
    append_paged_kv_cache_trace,
    append_paged_mla_kv_cache_trace,
    get_batch_indices_positions_trace,
    get_seq_lens_trace,
)

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "gen_page_module",
    "get_batch_indices_positions",
    "get_page_module",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]


def get_page_module() -> Any:
    """The loaded module of all that is here, compiled if need be."""
    return gen_page_module().build_and_load()


def _table(function: str) -> KernelTable:
    # One module serves every dtype; a dtype that caches do not have is refused by the binding.
    def get_kernel(dtype: torch.dtype) -> Kernel:
        return cast(Kernel, getattr(get_page_module(), function))

    return KernelTable(get_kernel)


def _float4_table(function: str) -> KernelTable:
    def get_kernel(dtype: torch.dtype) -> Kernel:
        module = gen_kv_float4_module(KVFloat4Config(dtype)).build_and_load()
        return cast(Kernel, getattr(module, function))

    return KernelTable(get_kernel)


_append_float4 = _float4_table("kv_float4_append")
_append_float4_slots = _float4_table("kv_float4_append_slots")
_append_paged_kv_cache = _table("append_paged_kv_cache")
_append_paged_mla_kv_cache = _table("append_paged_mla_kv_cache")
_get_batch_indices_positions = _table("get_batch_indices_positions")
_get_seq_lens = _table("get_seq_lens")
_INDICES_OF_APPENDS = dict.fromkeys((2, 3, 6, 7, 8), torch.int32)


@flashinfer_api(trace=append_paged_kv_cache_trace)
def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens to their slots of a paged cache.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        ``[nnz, num_kv_heads, head_dim]``, dtype of the cache, last dimension contiguous, other
        strides free (slices of a fused projection are fine).
    batch_indices : torch.Tensor
        Request of each token, ``[nnz]``, int32; see `get_batch_indices_positions`. Integers of
        another dtype are converted, here and below, which launches kernels more.
    positions : torch.Tensor
        Position of each token in its request, ``[nnz]``, int32.
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        Keys and values as two tensors of ``[num_pages, page_size, num_kv_heads, head_dim]`` (for
        ``"NHD"``) or ``[num_pages, num_kv_heads, page_size, head_dim]`` (for ``"HND"``), or as
        one with a dimension of 2 after the first; pages of one token need no dimension for it.
        float16, bfloat16, float32, float8_e4m3fn,
        float8_e5m2, int8 or uint8; last dimension contiguous, other strides free; any page size,
        any number of elements.
    kv_indices : torch.Tensor
        Page numbers of all requests, int32, at least ``kv_indptr[-1]`` of them.
    kv_indptr : torch.Tensor
        First entry of each request in `kv_indices`, ``[batch_size + 1]``, int32.
    kv_last_page_len : torch.Tensor
        Tokens in each request's last page, ``[batch_size]``, int32. Only its shape and dtype are
        looked at: `positions` say where tokens go.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.

    Raises
    ------
    TypeError
        If an argument is not a tensor.
    ValueError
        If a tensor is not on the GPU, shares memory with a cache or has a shape, dtype or stride
        not listed above; if `kv_layout` is another one.

    Notes
    -----
    W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023. Values of index tensors are on the device and not checked on the host:
    a token whose batch index is negative (padding), or whose batch index or position leads to no
    page of its request or of the cache, is not written.

    Examples
    --------
    >>> cache = torch.zeros(64, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    >>> k, v = torch.randn(2, 5, 8, 128, dtype=torch.bfloat16, device="cuda")
    >>> i32 = dict(dtype=torch.int32, device="cuda")
    >>> append_indptr, seq_lens = torch.tensor([0, 2, 5], **i32), torch.tensor([20, 3], **i32)
    >>> batch, pos = flashinfer.get_batch_indices_positions(append_indptr, seq_lens, 5)
    >>> pages, indptr = torch.tensor([7, 3, 9], **i32), torch.tensor([0, 2, 3], **i32)
    >>> last = torch.tensor([4, 3], **i32)
    >>> flashinfer.append_paged_kv_cache(k, v, batch, pos, cache, pages, indptr, last)
    """
    hnd = is_hnd(kv_layout)
    first, second = split_cache(of_pages(paged_kv_cache, kv_layout))
    try:
        kernel = _append_paged_kv_cache[append_key.dtype]
    except NOT_LOADED:
        kernel = _append_paged_kv_cache.load(append_key=append_key)
    indices = (kv_indices, kv_indptr, kv_last_page_len)
    arguments = (append_key, append_value, batch_indices, positions, first, second, *indices, hnd)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, _INDICES_OF_APPENDS))


@flashinfer_api(trace=append_paged_mla_kv_cache_trace)
def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor | None,
    kpe_cache: torch.Tensor | None,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Write the latent keys and values of new tokens to their slots of paged caches.

    Parameters
    ----------
    append_ckv : torch.Tensor
        Compressed KV, ``[nnz, ckv_dim]``, dtype of `ckv_cache`, last dimension contiguous.
    append_kpe : torch.Tensor
        Rotary part of the keys, ``[nnz, kpe_dim]``, dtype of `kpe_cache`, last dimension
        contiguous.
    ckv_cache, kpe_cache : torch.Tensor
        ``[num_pages, page_size, ckv_dim]`` and ``[num_pages, page_size, kpe_dim]``, dtypes as for
        `append_paged_kv_cache`; last dimension contiguous, other strides free (the two may be
        column slices of one tensor). Both are required.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len : torch.Tensor
        As for `append_paged_kv_cache`.

    Raises
    ------
    TypeError, ValueError
        As for `append_paged_kv_cache`.
    """
    try:
        kernel = _append_paged_mla_kv_cache[append_ckv.dtype]
    except NOT_LOADED:
        kernel = _append_paged_mla_kv_cache.load(append_ckv=append_ckv)
    caches, indices = (ckv_cache, kpe_cache), (kv_indices, kv_indptr, kv_last_page_len)
    arguments = (append_ckv, append_kpe, batch_indices, positions, *caches, *indices)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, _INDICES_OF_APPENDS))


@flashinfer_api(trace=get_batch_indices_positions_trace)
def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of each token of an append.

    Parameters
    ----------
    append_indptr : torch.Tensor
        First new token of each request, ``[batch_size + 1]``, int32, not decreasing. Integers of
        another dtype are converted, here and below.
    seq_lens : torch.Tensor
        Length of each request with its new tokens, ``[batch_size]``, int32.
    nnz : int
        Number of tokens, from 0 to 2^31 - 1. May exceed ``append_indptr[-1]``, so that one CUDA
        graph serves batches of several sizes.
    batch_indices, positions : torch.Tensor, optional
        Results, ``[nnz]``, int32, contiguous.

    Returns
    -------
    batch_indices : torch.Tensor
        ``[nnz]``, int32: the request of each token, -1 for tokens of no request.
    positions : torch.Tensor
        ``[nnz]``, int32: the position in that request, 0 for tokens of no request. A request's
        last new token is at ``seq_lens - 1``.

    Raises
    ------
    TypeError
        If an argument is not a tensor, or `nnz` not an int.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype or stride not listed above; if `nnz`
        is out of range.

    Examples
    --------
    >>> append_indptr = torch.tensor([0, 1, 3, 6, 10], dtype=torch.int32, device="cuda")
    >>> seq_lens = torch.tensor([5, 5, 5, 5], dtype=torch.int32, device="cuda")
    >>> flashinfer.get_batch_indices_positions(append_indptr, seq_lens, 10)[1].tolist()
    [4, 3, 4, 2, 3, 4, 1, 2, 3, 4]
    """
    nnz = checks.count("nnz", nnz, 0)
    if batch_indices is None:
        batch_indices = _empty_indices(nnz, "append_indptr", append_indptr)
    if positions is None:
        positions = _empty_indices(nnz, "append_indptr", append_indptr)
    try:
        kernel = _get_batch_indices_positions[append_indptr.dtype]
    except NOT_LOADED:
        kernel = _get_batch_indices_positions.load(append_indptr=append_indptr)
    arguments = (batch_indices, positions, append_indptr, seq_lens, nnz)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, {2: torch.int32, 3: torch.int32}))
    return batch_indices, positions


def _empty_indices(count: int, name: str, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32, device=checks.tensor(name, like).device)


@flashinfer_api(trace=get_seq_lens_trace)
def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Tokens of each request in a paged cache.

    Parameters
    ----------
    kv_indptr : torch.Tensor
        First page of each request, ``[batch_size + 1]``, int32. Integers of another dtype are
        converted, here and below.
    kv_last_page_len : torch.Tensor
        Tokens in each request's last page, ``[batch_size]``, int32.
    page_size : int
        Slots of a page, at least 1.

    Returns
    -------
    torch.Tensor
        ``[batch_size]``, int32: ``(pages - 1) * page_size + kv_last_page_len``; a request without
        pages has `kv_last_page_len` tokens (0, that is).

    Raises
    ------
    TypeError
        If an argument is not a tensor, or `page_size` not an int.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype or stride not listed above; if
        `page_size` is less than 1.

    Examples
    --------
    >>> indptr = torch.tensor([0, 2, 3], dtype=torch.int32, device="cuda")
    >>> last = torch.tensor([4, 16], dtype=torch.int32, device="cuda")
    >>> flashinfer.get_seq_lens(indptr, last, 16).tolist()
    [20, 16]
    """
    page_size = checks.count("page_size", page_size)
    checks.tensor("kv_last_page_len", kv_last_page_len)
    seq_lens = torch.empty_like(
        kv_last_page_len, dtype=torch.int32, memory_format=torch.contiguous_format
    )
    try:
        kernel = _get_seq_lens[kv_indptr.dtype]
    except NOT_LOADED:
        kernel = _get_seq_lens.load(kv_indptr=kv_indptr)
    arguments = (seq_lens, kv_indptr, kv_last_page_len, page_size)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, {1: torch.int32, 2: torch.int32}))
    return seq_lens


@flashinfer_api(trace=nvfp4_quantize_append_paged_kv_cache_trace)
def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Quantise the keys and values of new tokens to 4 bits (NVFP4) in their slots of a cache.

    A block of 16 elements has a scale, ``amax / 6 / g`` rounded to E4M3, and codes
    ``x / (scale * g)`` rounded to E2M1, with g the global scale: ``x = code * scale * g``.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        ``[nnz, num_kv_heads, head_dim]``, float16 or bfloat16, of one shape and dtype; head_dim is
        a multiple of 16; last dimension contiguous, rows at multiples of 16 bytes.
    batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len : torch.Tensor
        As for `append_paged_kv_cache`.
    paged_kv_cache : torch.Tensor or tuple of torch.Tensor
        Codes, as for `append_paged_kv_cache`, uint8 with rows of ``head_dim / 2``, two a byte, the
        first in the lower bits; rows at multiples of 8 bytes.
    kv_cache_sf : torch.Tensor or tuple of torch.Tensor
        Scales, in either form, float8_e4m3fn or its bits as uint8, rows of ``head_dim / 16``; last
        dimension contiguous, other strides free.
    k_scale, v_scale : float or torch.Tensor
        Global scales, positive: those that attention takes by these names. A number, or one float32
        on the GPU, which is not checked.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    NVIDIA, "Pretraining Large Language Models with NVFP4", 2025. A NaN makes the scale of its block
    NaN. Tokens without a slot are not written, as with `append_paged_kv_cache`.
    """
    places = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    caches = _packed_caches(paged_kv_cache, kv_cache_sf, kv_layout)
    arguments = (append_key, append_value, places, caches, _global_scales(k_scale, v_scale))
    try:
        kernel = _append_float4[append_key.dtype]
    except NOT_LOADED:
        kernel = _append_float4.load(append_key=append_key)
    try:
        kernel(*arguments, is_hnd(kv_layout))
    except ValueError:
        places = tuple(converted(places, dict.fromkeys(range(5), torch.int32)))
        kernel(append_key, append_value, places, *arguments[3:], is_hnd(kv_layout))


@flashinfer_api(trace=nvfp4_quantize_append_slots_trace)
def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Quantise keys and values to 4 bits (NVFP4) in slots of a cache that the caller has chosen.

    Parameters
    ----------
    append_key, append_value : torch.Tensor
        As for `nvfp4_quantize_append_paged_kv_cache`, with at least as many rows as there are
        slots; further ones are padding.
    slot_mapping : torch.Tensor
        ``[nnz]``, int32 or int64, contiguous: ``page * page_size + slot`` of each row. What is
        negative, or beyond the cache, is not written.
    paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout
        As for `nvfp4_quantize_append_paged_kv_cache`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.
    """
    caches = _packed_caches(paged_kv_cache, kv_cache_sf, kv_layout)
    try:
        kernel = _append_float4_slots[append_key.dtype]
    except NOT_LOADED:
        kernel = _append_float4_slots.load(append_key=append_key)
    scales = _global_scales(k_scale, v_scale)
    kernel(append_key, append_value, slot_mapping, caches, scales, is_hnd(kv_layout))


def _packed_caches(cache: Any, scales: Any, kv_layout: str) -> tuple[Any, Any, Any, Any]:
    """Codes and scales of keys and of values, None for values in the tensor of the keys."""
    k, v = split_cache(of_pages(cache, kv_layout))
    k_sf, v_sf = split_cache(of_pages(scales, kv_layout), "kv_cache_sf")
    return k, v, k_sf, v_sf


def _global_scales(k_scale: Any, v_scale: Any) -> tuple[Any, Any, Any, Any]:
    """A tensor or None, and a number where there is none, of keys and of values."""
    result: list[Any] = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(scale, torch.Tensor) and scale.is_cpu and scale.numel() == 1:
            scale = scale.item()
        if isinstance(scale, torch.Tensor):
            result += [scale, 1.0]
        elif isinstance(scale := plain(scale), bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"`{name}` must be a number or a torch.Tensor, got {scale!r}")
        else:
            result += [None, float(scale)]
    return result[0], result[1], result[2], result[3]
