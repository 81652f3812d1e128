"""Rotary embedding whose result is quantised to 8-bit floats, and appended to a paged cache."""

from typing import Any, cast

import torch

from .._common import checks
from .._common.cache_layout import is_hnd
from .._common.conversions import converted
from .._common.dtypes import FLOAT, FLOAT8, check_dtype
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._instrument.decorator import flashinfer_api
from ..jit.rope import RopeConfig, gen_rope_module
from ..trace.templates.rope_quantize import (
    mla_rope_quantize_fp8_trace,
    rope_quantize_fp8_append_paged_kv_cache_trace,
    rope_quantize_fp8_trace,
)


def _table(*, is_neox: bool, append: bool) -> KernelTable:
    def get_kernel(dtype: torch.dtype, cache: torch.dtype, out_dtype: torch.dtype) -> Kernel:
        check_dtype("q_rope", dtype, FLOAT)
        check_dtype("quantize_dtype", out_dtype, FLOAT8)
        config = RopeConfig(dtype, out_dtype, not is_neox, False, cache, append)
        module = gen_rope_module(config).build_and_load()
        return cast(Kernel, module.rope_quantize_append if append else module.rope_quantize)

    return KernelTable(get_kernel)


_quantize = {flag: _table(is_neox=flag, append=False) for flag in (False, True)}
_quantize_append = {flag: _table(is_neox=flag, append=True) for flag in (False, True)}


def _out_dtype(quantize_dtype: torch.dtype | None, *outs: Any) -> torch.dtype:
    """The dtype asked for, else that of a given output, else float8_e4m3fn."""
    if quantize_dtype is not None:
        return checks.dtype("quantize_dtype", quantize_dtype, FLOAT8)
    for out in outs:
        if isinstance(out, torch.Tensor):
            return out.dtype
    return torch.float8_e4m3fn


def _nope_out(
    out: torch.Tensor | None, nope: Any, rope: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`out`, or a new result for `nope`; without `nope`, one without columns."""
    if out is not None:
        return out
    if isinstance(nope, torch.Tensor):
        return torch.empty_like(nope, dtype=dtype)
    return torch.empty((*rope.shape[:-1], 0), dtype=dtype, device=rope.device)


def _run(
    inputs: tuple[Any, ...],
    cos_sin_cache: Any,
    pos_ids: Any,
    outs: tuple[Any, ...],
    is_neox: bool,
    quantize_dtype: torch.dtype | None,
    options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rope_quantize_fp8`; `inputs`, `outs` and `options` in the order of its arguments."""
    table = _quantize[checks.flag("is_neox", is_neox)]
    q_rope, k_rope, q_nope, k_nope = inputs
    checks.tensor("q_rope", q_rope)
    checks.tensor("k_rope", k_rope)
    dtype = _out_dtype(quantize_dtype, *outs)
    q_rope_out, k_rope_out, q_nope_out, k_nope_out = outs
    outs = (
        torch.empty_like(q_rope, dtype=dtype) if q_rope_out is None else q_rope_out,
        torch.empty_like(k_rope, dtype=dtype) if k_rope_out is None else k_rope_out,
        _nope_out(q_nope_out, q_nope, q_rope, dtype),
        _nope_out(k_nope_out, k_nope, k_rope, dtype),
    )
    try:
        kernel = table[q_rope.dtype, cos_sin_cache.dtype, dtype]
    except NOT_LOADED:
        kernel = table.load(dtype, q_rope=q_rope, cos_sin_cache=cos_sin_cache)
    kernel(outs, inputs, cos_sin_cache, pos_ids, *options)
    return outs


@flashinfer_api(trace=rope_quantize_fp8_trace)
def rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotary embedding and quantisation: ``out = saturate(value * quant_scale)``.

    The `rope` parts are rotated, the `nope` parts are not. Values beyond the largest finite 8-bit
    float become that one; NaN stays NaN.

    Parameters
    ----------
    q_rope : torch.Tensor
        ``[nnz, num_qo_heads, rope_dim]``, float16, bfloat16 or float32, last dimension contiguous,
        other strides free.
    k_rope : torch.Tensor
        ``[nnz, num_kv_heads, rope_dim]``, or ``[nnz, rope_dim]`` for one head; dtype of `q_rope`,
        last dimension contiguous.
    q_nope, k_nope : torch.Tensor, optional
        Shapes of `q_rope` and `k_rope` but for the last dimension; dtype of `q_rope`, last
        dimension contiguous.
    cos_sin_cache : torch.Tensor
        ``[max_position, rope_dim]``, as for `apply_rope_with_cos_sin_cache`.
    pos_ids : torch.Tensor
        Position of each token, ``[nnz]``, int32 or int64, contiguous. What is rotated by a position
        outside the cache becomes NaN.
    is_neox : bool
        Pairs are ``(j, j + rope_dim / 2)``; False: ``(2 j, 2 j + 1)``.
    quantize_dtype : torch.dtype, optional
        float8_e4m3fn or float8_e5m2. None: that of the outputs given, else float8_e4m3fn.
    quant_scale_q, quant_scale_kv : float
        Factors of the results of `q` and of `k`. Positive, finite.
    q_rope_out, k_rope_out, q_nope_out, k_nope_out : torch.Tensor, optional
        Results; shapes of the inputs, last dimension contiguous, other strides free.
    enable_pdl : bool
        Programmatic dependent launch, where the device has it; None: wherever it has.
    backend : str
        ``"cuda"``, the only one there is.

    Returns
    -------
    q_rope_out, k_rope_out, q_nope_out, k_nope_out : torch.Tensor
        A `nope` result has no columns where there is no input.

    Raises
    ------
    TypeError
        If an argument is of another type.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above, or
        another argument is out of range.

    Notes
    -----
    J. Su et al., "RoFormer", 2021; P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

    Examples
    --------
    >>> q, k = torch.randn(2, 5, 8, 128, dtype=torch.bfloat16, device="cuda")
    >>> angle = torch.arange(4096.0)[:, None] * 1e4 ** (-torch.arange(32) / 32)
    >>> cache = torch.cat([angle.cos(), angle.sin()], -1).cuda()
    >>> parts = q[..., :64], k[..., :64], q[..., 64:], k[..., 64:]
    >>> pos_ids = torch.arange(5, dtype=torch.int32, device="cuda")
    >>> results = flashinfer.rope.rope_quantize_fp8(*parts, cache, pos_ids)
    """
    if backend != "cuda":
        raise ValueError(f"`backend` must be 'cuda', got {backend!r}")
    return _run(
        (q_rope, k_rope, q_nope, k_nope),
        cos_sin_cache,
        pos_ids,
        (q_rope_out, k_rope_out, q_nope_out, k_nope_out),
        is_neox,
        quantize_dtype,
        (quant_scale_q, quant_scale_kv, enable_pdl),
    )


@flashinfer_api(trace=mla_rope_quantize_fp8_trace)
def mla_rope_quantize_fp8(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None,
    k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    k_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rope_quantize_fp8` of multi-head latent attention: `k_rope` and `k_nope` have one head.

    Parameters
    ----------
    k_rope, k_nope : torch.Tensor
        ``[nnz, rope_dim]`` and ``[nnz, nope_dim]``: the rotary part of K and the compressed KV.
    q_rope, q_nope
        ``[nnz, num_heads, rope_dim]`` and ``[nnz, num_heads, nope_dim]``.

    The other arguments, results and errors are those of `rope_quantize_fp8`.
    """
    checks.tensor("q_nope", q_nope)
    checks.tensor("k_nope", k_nope)
    return _run(
        (q_rope, k_rope, q_nope, k_nope),
        cos_sin_cache,
        pos_ids,
        (q_rope_out, k_rope_out, q_nope_out, k_nope_out),
        is_neox,
        quantize_dtype,
        (quant_scale_q, quant_scale_kv, enable_pdl),
    )


@flashinfer_api(trace=rope_quantize_fp8_append_paged_kv_cache_trace)
def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    v: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope_quantize_fp8` whose K, and V with it, go to a paged cache.

    Parameters
    ----------
    q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, enable_pdl
        As for `rope_quantize_fp8`.
    v : torch.Tensor, optional
        ``[nnz, num_kv_heads, v_dim]``, dtype of `q_rope`, last dimension contiguous. None:
        multi-head latent attention, K of one head.
    paged_kv_cache : tuple of torch.Tensor
        With `v`, caches of K and V: ``[num_pages, page_size, num_kv_heads, dim]`` for ``"NHD"``,
        ``[num_pages, num_kv_heads, page_size, dim]`` for ``"HND"``, where `dim` is ``rope_dim +
        nope_dim`` (in this order) or `v_dim`. Without, caches of `k_nope` (compressed KV) and of
        `k_rope`: ``[num_pages, page_size, nope_dim]`` and ``[num_pages, page_size, rope_dim]``.
        Dtype `quantize_dtype`; last dimension contiguous, other strides free.
    kv_indices, kv_indptr, batch_indices, positions : torch.Tensor
        As for `append_paged_kv_cache`, which also says which tokens are not written. The rotation
        follows `pos_ids`, the slot `positions`.
    quant_scale_q, quant_scale_kv : float
        Factors of the results of `q`, and of K and V. Positive, finite.
    page_size : int
        Slots of a page, as in the caches.
    kv_layout : str
        ``"NHD"`` or ``"HND"``; without `v` the caches have no heads, and it changes nothing.
    q_rope_out, q_nope_out : torch.Tensor, optional
        Results; shapes of `q_rope` and `q_nope`, last dimension contiguous.

    Returns
    -------
    q_rope_out, q_nope_out : torch.Tensor
        `q_nope_out` has no columns where there is no `q_nope`.

    Raises
    ------
    TypeError, ValueError
        As for `rope_quantize_fp8` and `append_paged_kv_cache`.
    """
    hnd = is_hnd(kv_layout)
    table = _quantize_append[checks.flag("is_neox", is_neox)]
    checks.tensor("q_rope", q_rope)
    checks.tensor("k_rope", k_rope)
    if not isinstance(paged_kv_cache, (tuple, list)) or len(paged_kv_cache) != 2:
        raise TypeError(
            f"`paged_kv_cache` must be a pair of torch.Tensor, got {type(paged_kv_cache).__name__}"
        )
    dtype = _out_dtype(quantize_dtype, q_rope_out, q_nope_out, *paged_kv_cache)
    if q_rope_out is None:
        q_rope_out = torch.empty_like(q_rope, dtype=dtype)
    q_nope_out = _nope_out(q_nope_out, q_nope, q_rope, dtype)
    arguments = (
        (q_rope_out, q_nope_out),
        tuple(paged_kv_cache),
        (q_rope, k_rope, q_nope, k_nope),
        v,
        cos_sin_cache,
        pos_ids,
        (kv_indices, kv_indptr, batch_indices, positions, page_size),
        hnd,
        quant_scale_q,
        quant_scale_kv,
        enable_pdl,
    )
    try:
        kernel = table[q_rope.dtype, cos_sin_cache.dtype, dtype]
    except NOT_LOADED:
        kernel = table.load(dtype, q_rope=q_rope, cos_sin_cache=cos_sin_cache)
    try:
        kernel(*arguments)
    except ValueError:
        indices = converted(arguments[6], dict.fromkeys(range(4), torch.int32))
        kernel(*arguments[:6], tuple(indices), *arguments[7:])
    return q_rope_out, q_nope_out
