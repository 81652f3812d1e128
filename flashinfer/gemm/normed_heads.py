"""Heads of queries, keys and values of a row that a norm makes."""

import torch

from .._common import checks
from .._common.arch import get_compute_capability
from .._common.cache_layout import is_hnd
from .._instrument.questions import says_where_it_runs
from ..compat.backends import BackendSupportedError
from ..jit.one_row import COLUMNS
from ._one_row import heads_kernel
from ._tuning import HOPPER, is_hopper
from .normed import MOST_K


@says_where_it_runs(is_hopper)
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
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    normed_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    weight_ready: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token's queries, keys and values, turned and appended, in the kernel of their product."""
    checks.tensor("input", input, 2)
    checks.tensor("b", b, 2)
    checks.tensor("cos_sin_cache", cos_sin_cache, 2)
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        raise TypeError(
            f"`paged_kv_cache` must be a pair of torch.Tensor, got {type(paged_kv_cache).__name__}"
        )
    first, second = (checks.tensor("paged_kv_cache", cache, 4) for cache in paged_kv_cache)
    if input.shape[0] != 1 or input.shape[1] > MOST_K:
        raise ValueError(f"`input` must be [1, at most {MOST_K}], got shape {list(input.shape)}")
    if cos_sin_cache.shape[1] not in COLUMNS:
        raise ValueError(
            f"`cos_sin_cache` must have a head's {COLUMNS[0]} or {COLUMNS[1]} columns, got shape "
            f"{list(cos_sin_cache.shape)}"
        )
    ready = checks.flag("weight_ready", weight_ready)
    neox = checks.flag("is_neox", is_neox)
    checks.cuda_tensors(input=input, b=b)
    if get_compute_capability(input.device) != HOPPER:
        raise BackendSupportedError("`add_rmsnorm_mm_rope_append_bf16` needs a Hopper GPU")
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
    pages = kv_indices, kv_indptr, batch_indices, positions, page_size
    options = hnd, quant_scale_k, quant_scale_v
    pdl = True if enable_pdl is None else checks.flag("enable_pdl", enable_pdl)
    row = q_out, input, b, bias, splits, pdl, ready
    kernel(*row, norm, heads, (first, second), pages, options)
    return q_out, residual_out, normed_out
