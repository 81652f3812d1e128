"""Paged key-value caches: appending new tokens, and the index tensors that this takes.

A cache is a pool of pages of `page_size` slots. Request ``b`` owns the pages
``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``, in order; its token at position ``p`` is in the
request's page ``p // page_size`` at slot ``p % page_size``.
"""

from typing import Any, cast

import torch

from ._common import checks
from ._common.cache_layout import is_hnd, of_pages
from ._common.conversions import converted
from ._common.kernels import NOT_LOADED, Kernel, KernelTable
from ._instrument.decorator import flashinfer_api
from .compat.backends import only_elsewhere
from .jit.page import gen_page_module
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
    first, second = _split(of_pages(paged_kv_cache, kv_layout))
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


def _split(cache: Any) -> tuple[Any, Any]:
    """A fused cache and None, or the caches of keys and of values."""
    if isinstance(cache, torch.Tensor):
        return cache, None
    if not isinstance(cache, (tuple, list)) or len(cache) != 2 or cache[1] is None:
        raise TypeError(
            f"`paged_kv_cache` must be a torch.Tensor or a pair of them, got {type(cache).__name__}"
        )
    return cache[0], cache[1]


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


@only_elsewhere((80, 86, 89, 90, 120, 121))
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
    """Write keys and values to a 4-bit cache by slot; caches of 4 bits are not built here."""
    raise NotImplementedError
