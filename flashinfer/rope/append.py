"""Rotary embedding of new tokens on their way to a paged cache."""

from typing import cast

import torch

from .._common import checks
from .._common.cache_layout import is_hnd
from .._common.conversions import converted
from .._common.dtypes import FLOAT, check_dtype
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._instrument.decorator import flashinfer_api
from ..jit.rope import RopeConfig, gen_rope_module
from ..trace.templates.rope_append import rope_append_paged_kv_cache_trace


def _table(*, is_neox: bool) -> KernelTable:
    def get_kernel(dtype: torch.dtype, cache: torch.dtype, out_dtype: torch.dtype) -> Kernel:
        check_dtype("q", dtype, FLOAT)
        config = RopeConfig(dtype, out_dtype, not is_neox, False, cache, True, keeps_rows=True)
        return cast(Kernel, gen_rope_module(config).build_and_load().rope_append)

    return KernelTable(get_kernel)


_tables = {flag: _table(is_neox=flag) for flag in (False, True)}


@flashinfer_api(trace=rope_append_paged_kv_cache_trace)
def rope_append_paged_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    is_neox: bool = True,
    quant_scale_k: float = 1.0,
    quant_scale_v: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
) -> None:
    """Turn queries in place, and write turned keys, and values, to a paged cache.

    One kernel for what `rmsnorm` of each head, `apply_rope_with_cos_sin_cache_inplace` and
    `append_paged_kv_cache` do one after the other, without rounding between.

    Parameters
    ----------
    q : torch.Tensor
        ``[nnz, num_qo_heads, head_dim]``, float16, bfloat16 or float32, last dimension contiguous,
        other strides free. Written.
    k : torch.Tensor
        ``[nnz, num_kv_heads, head_dim]``, dtype of `q`, last dimension contiguous.
    v : torch.Tensor
        ``[nnz, num_kv_heads, v_dim]``, dtype of `q`, last dimension contiguous.
    cos_sin_cache : torch.Tensor
        ``[max_position, head_dim]``, as for `apply_rope_with_cos_sin_cache`.
    pos_ids : torch.Tensor
        Position of each token, ``[nnz]``, int32 or int64, contiguous. What is rotated by a position
        outside the cache becomes NaN.
    paged_kv_cache : tuple of torch.Tensor
        Caches of K and V: ``[num_pages, page_size, num_kv_heads, dim]`` for ``"NHD"``,
        ``[num_pages, num_kv_heads, page_size, dim]`` for ``"HND"``, where `dim` is `head_dim` or
        `v_dim`. Dtype of `q`, float8_e4m3fn or float8_e5m2; last dimension contiguous, other
        strides free.
    kv_indices, kv_indptr, batch_indices, positions : torch.Tensor
        As for `append_paged_kv_cache`, which also says which tokens are not written. The rotation
        follows `pos_ids`, the slot `positions`.
    q_weight, k_weight : torch.Tensor, optional
        ``[head_dim]``, dtype of `q`, contiguous: weights of an RMS norm of each head of `q` or `k`,
        which comes before the rotation. `head_dim` must then be 16 (float32: 8) times a power of
        two up to 32, and all rows aligned to 16 bytes. None: there is no norm.
    eps : float
        Added to the mean of the squares. Not negative, finite.
    is_neox : bool
        Pairs are ``(j, j + head_dim / 2)``; False: ``(2 j, 2 j + 1)``.
    quant_scale_k, quant_scale_v : float
        Factors of the keys and values that the cache gets. Positive, finite.
    page_size : int
        Slots of a page, as in the caches.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    enable_pdl : bool, optional
        Programmatic dependent launch, where the device has it; None: wherever it has.

    Raises
    ------
    TypeError, ValueError
        As for `rope_quantize_fp8_append_paged_kv_cache`.

    Notes
    -----
    J. Su et al., "RoFormer", 2021; B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization",
    2019.
    """
    hnd = is_hnd(kv_layout)
    table = _tables[checks.flag("is_neox", is_neox)]
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        raise TypeError(
            f"`paged_kv_cache` must be a pair of torch.Tensor, got {type(paged_kv_cache).__name__}"
        )
    first, second = paged_kv_cache
    arguments = (
        *(q, k, v, q_weight, k_weight, eps, cos_sin_cache, pos_ids, (first, second)),
        (kv_indices, kv_indptr, batch_indices, positions, page_size),
        (hnd, quant_scale_k, quant_scale_v),
        enable_pdl,
    )
    try:
        kernel = table[q.dtype, cos_sin_cache.dtype, first.dtype]
    except (*NOT_LOADED, AttributeError):
        caches = {"cos_sin_cache": cos_sin_cache, "paged_kv_cache": first}
        kernel = table.load(q=q, **caches)
    try:
        kernel(*arguments)
    except ValueError:
        indices = converted(arguments[9], dict.fromkeys(range(4), torch.int32))
        kernel(*arguments[:9], tuple(indices), *arguments[10:])
