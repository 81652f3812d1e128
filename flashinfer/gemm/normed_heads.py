"""Heads of queries, keys and values of a row that a norm makes."""

import torch

from .._common import checks
from .._common.cache_layout import is_hnd
from .._instrument.decorator import flashinfer_api
from .._instrument.questions import says_where_it_runs
from ..jit.one_row import COLUMNS
from ..trace.templates.normed_heads import add_rmsnorm_mm_rope_append_bf16_trace
from ._one_row import heads_kernel
from ._tuning import is_hopper
from .normed import check_normed_row, need_hopper


@says_where_it_runs(is_hopper)
@flashinfer_api(trace=add_rmsnorm_mm_rope_append_bf16_trace)
def add_rmsnorm_mm_rope_append_bf16(
    input: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    b: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    head_eps: float = 1e-6,
    is_neox: bool = True,
    quant_scale_k: float = 1.0,
    quant_scale_v: float = 1.0,
    kv_layout: str = "NHD",
    q_out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    normed_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    weight_ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token's queries, keys and values: product, norms, rotation and append in one kernel.

    What `add_rmsnorm_mm_bf16` and `rope.rope_append_paged_kv_cache` do one after the other, without
    rounding between: the thread blocks that have multiplied a head's columns finish it.

    Parameters
    ----------
    input, residual : torch.Tensor
        ``[1, k]``, bfloat16, on a Hopper GPU. k is a multiple of 8, at most 4096.
    norm_weight : torch.Tensor
        ``[k]``, bfloat16, contiguous.
    b : torch.Tensor
        ``[k, n]``, bfloat16, rows contiguous and beginning at multiples of 16 bytes: columns of the
        heads of queries, of keys and of values, one after the other.
    cos_sin_cache : torch.Tensor
        ``[max_position, head_dim]``, as for `apply_rope_with_cos_sin_cache`; `head_dim`, of all
        heads, is 64 or 128.
    pos_ids : torch.Tensor
        The token's position, ``[1]``, int32 or int64. What is rotated by a position outside the
        cache becomes NaN.
    paged_kv_cache : tuple of torch.Tensor
        Caches of K and V: ``[num_pages, page_size, num_kv_heads, head_dim]`` for ``"NHD"``,
        ``[num_pages, num_kv_heads, page_size, head_dim]`` for ``"HND"``. bfloat16, float8_e4m3fn or
        float8_e5m2; last dimension contiguous, heads aligned to 16 bytes (8 bits: 8 bytes).
    kv_indices, kv_indptr, batch_indices, positions : torch.Tensor
        int32, as for `append_paged_kv_cache` with one token.
    q_weight, k_weight : torch.Tensor, optional
        ``[head_dim]``, bfloat16, contiguous: weights of an RMS norm of each head of queries or of
        keys, before the rotation. None: there is no norm.
    bias : torch.Tensor, optional
        ``[n]``, bfloat16.
    eps, head_eps : float
        Under the roots of the row's norm and of the heads' norms. Finite, not negative.
    is_neox : bool
        Pairs are ``(j, j + head_dim / 2)``; False: ``(2 j, 2 j + 1)``.
    quant_scale_k, quant_scale_v : float
        Factors of the keys and values that the cache gets. Positive, finite.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.
    q_out : torch.Tensor, optional
        ``[1, num_qo_heads, head_dim]``, bfloat16, contiguous: receives the queries. None of the
        results may overlap an argument.
    residual_out, normed_out : torch.Tensor, optional
        ``[1, k]``, bfloat16: receive the sum and its norm.
    enable_pdl : bool, optional
        Programmatic dependent launch; None: yes. Changes no result.
    weight_ready : bool
        The kernel that precedes this one writes nothing that is read here but `input` and
        `residual`, and what wrote the rest had ended when it began: all of it may be loaded before
        that kernel ends. Changes no result.

    Returns
    -------
    (torch.Tensor, torch.Tensor, torch.Tensor)
        The queries, the sum and its norm.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    BackendSupportedError
        A ``ValueError``: if the GPU is not a Hopper.

    Notes
    -----
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; J. Su et al., "RoFormer",
    2021.
    """
    check_normed_row(input, b)
    checks.tensor("cos_sin_cache", cos_sin_cache, 2)
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        raise TypeError(
            f"`paged_kv_cache` must be a pair of torch.Tensor, got {type(paged_kv_cache).__name__}"
        )
    first, second = (checks.tensor("paged_kv_cache", cache, 4) for cache in paged_kv_cache)
    if cos_sin_cache.shape[1] not in COLUMNS:
        raise ValueError(
            f"`cos_sin_cache` must have a head's {COLUMNS[0]} or {COLUMNS[1]} columns, got shape "
            f"{list(cos_sin_cache.shape)}"
        )
    ready = checks.flag("weight_ready", weight_ready)
    neox = checks.flag("is_neox", is_neox)
    need_hopper("add_rmsnorm_mm_rope_append_bf16", input=input, b=b)
    hnd, dim = is_hnd(kv_layout), cos_sin_cache.shape[1]
    if q_out is None:
        kv_heads = first.shape[1 if hnd else 2]
        q_out = input.new_empty(1, max(b.shape[1] // dim - 2 * kv_heads, 0), dim)
    residual_out = torch.empty_like(input) if residual_out is None else residual_out
    normed_out = torch.empty_like(input) if normed_out is None else normed_out
    kernel, splits = heads_kernel(
        input.device, b.shape[1], b.shape[0], dim, first.dtype, cos_sin_cache.dtype, neox
    )
    norm = residual_out, normed_out, residual, norm_weight, checks.number("eps", eps)
    heads = q_weight, k_weight, head_eps, cos_sin_cache, pos_ids
    page_size = first.shape[2 if hnd else 1]
    pages = kv_indices, kv_indptr, batch_indices, positions, page_size
    options = hnd, quant_scale_k, quant_scale_v
    pdl = True if enable_pdl is None else checks.flag("enable_pdl", enable_pdl)
    row = q_out, input, b, bias, splits, pdl, ready
    kernel(*row, norm, heads, (first, second), pages, options)
    return q_out, residual_out, normed_out
