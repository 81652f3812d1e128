"""Rotary position embedding of queries and keys in their own type."""

from typing import Any, cast

import torch

from .._common import checks
from .._common.conversions import converted
from .._common.dtypes import FLOAT, check_dtype
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._instrument.decorator import flashinfer_api
from ..jit.rope import RopeConfig, gen_rope_module
from ..trace.templates.rope import (
    apply_llama31_rope_inplace_trace,
    apply_llama31_rope_pos_ids_inplace_trace,
    apply_llama31_rope_pos_ids_trace,
    apply_llama31_rope_trace,
    apply_rope_inplace_trace,
    apply_rope_pos_ids_inplace_trace,
    apply_rope_pos_ids_trace,
    apply_rope_trace,
    apply_rope_with_cos_sin_cache_inplace_trace,
    apply_rope_with_cos_sin_cache_trace,
)


def get_rope_module() -> Any:
    """The module of `apply_rope` for float16 and halves as pairs, compiled if need be."""
    config = RopeConfig(torch.float16, torch.float16, interleave=False, computed=True)
    return gen_rope_module(config).build_and_load()


def _table(*, interleave: bool, computed: bool) -> KernelTable:
    def get_kernel(dtype: torch.dtype, cache_dtype: torch.dtype = torch.float32) -> Kernel:
        check_dtype("q" if computed else "query", dtype, FLOAT)
        config = RopeConfig(dtype, dtype, interleave, computed, cache_dtype)
        module = gen_rope_module(config).build_and_load()
        return cast(Kernel, module.rope if computed else module.rope_with_cache)

    return KernelTable(get_kernel)


_computed = {flag: _table(interleave=flag, computed=True) for flag in (False, True)}
_cached = {flag: _table(interleave=not flag, computed=False) for flag in (False, True)}


def _apply(
    inplace: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor | None,
    indptr: torch.Tensor | None,
    offsets: torch.Tensor | None,
    rotary_dim: int | None,
    interleave: bool,
    rope_scale: float,
    rope_theta: float,
    smoothing: tuple[float, float, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate with computed angles.

    `smoothing` is `low_freq_factor`, `high_freq_factor` and `old_context_len` of Llama 3.1.
    """
    table = _computed[checks.flag("interleave", interleave)]
    q_out, k_out = (q, k) if inplace else (_like(q), _like(k))
    numbers = rope_scale, rope_theta, smoothing
    try:
        kernel = table[q.dtype]
    except NOT_LOADED:
        kernel = table.load(q=q)
    dim = (q.shape or (0,))[-1] if rotary_dim is None else rotary_dim
    arguments = (q_out, k_out, q, k, pos_ids, indptr, offsets, dim, *numbers)
    try:
        kernel(*arguments)
    except ValueError:
        kernel(*converted(arguments, {5: torch.int32, 6: torch.int32}))
    return q_out, k_out


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Room for a result; what is no tensor is passed on for the kernel to refuse by name."""
    return torch.empty_like(tensor) if isinstance(tensor, torch.Tensor) else tensor


@flashinfer_api(trace=apply_rope_trace)
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Rotary embedding of a ragged batch.

    Token ``i`` of request ``b`` is at position ``offsets[b] + i - indptr[b]``, and pair ``j`` of it
    turns by position times

    .. math:: f_j = \frac{1}{\text{rope_scale}} \, \text{rope_theta}^{-2j / \text{rotary_dim}}

    Parameters
    ----------
    q : torch.Tensor
        ``[nnz, num_qo_heads, head_dim]``, float16, bfloat16 or float32, last dimension contiguous,
        other strides free.
    k : torch.Tensor
        ``[nnz, num_kv_heads, head_dim]``, dtype of `q`, last dimension contiguous.
    indptr : torch.Tensor
        First token of each request, ``[batch_size + 1]``, int32, not decreasing. Tokens outside
        of all requests keep their values. Integers of another dtype are converted.
    offsets : torch.Tensor
        Position of each request's first token, ``[batch_size]``, int32; others are converted.
    rotary_dim : int, optional
        Leading elements of a head that are rotated, the others are copied: even, at most `head_dim`
        and 512. None: all.
    interleave : bool
        Pairs are ``(2 j, 2 j + 1)`` instead of ``(j, j + rotary_dim / 2)``.
    rope_scale : float
        Positions are divided by it. Positive, finite.
    rope_theta : float
        Base of the wavelengths. Positive, finite.

    Returns
    -------
    q_rope, k_rope : torch.Tensor
        Shapes and dtype of `q` and `k`.

    Raises
    ------
    TypeError
        If an argument is of another type.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype, stride or overlap not listed above, or
        a number is out of range.

    Notes
    -----
    J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Examples
    --------
    >>> q = torch.randn(5, 32, 128, dtype=torch.bfloat16, device="cuda")
    >>> k = torch.randn(5, 8, 128, dtype=torch.bfloat16, device="cuda")
    >>> indptr = torch.tensor([0, 2, 5], dtype=torch.int32, device="cuda")
    >>> offsets = torch.tensor([100, 0], dtype=torch.int32, device="cuda")
    >>> q_rope, k_rope = flashinfer.apply_rope(q, k, indptr, offsets)
    """
    return _apply(
        False, q, k, None, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta
    )


@flashinfer_api(trace=apply_rope_inplace_trace)
def apply_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope` over `q` and `k`, which may share no memory. Arguments, errors as there."""
    _apply(True, q, k, None, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta)


@flashinfer_api(trace=apply_rope_pos_ids_trace)
def apply_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rope` with a position for each token.

    Parameters
    ----------
    pos_ids : torch.Tensor
        Position of each token, ``[nnz]``, int32 or int64, contiguous; any values.
    q, k, rotary_dim, interleave, rope_scale, rope_theta
        As for `apply_rope`, which also describes results and errors.
    """
    checks.tensor("pos_ids", pos_ids)
    return _apply(False, q, k, pos_ids, None, None, rotary_dim, interleave, rope_scale, rope_theta)


@flashinfer_api(trace=apply_rope_pos_ids_inplace_trace)
def apply_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope_pos_ids` over `q` and `k`, which may share no memory."""
    checks.tensor("pos_ids", pos_ids)
    _apply(True, q, k, pos_ids, None, None, rotary_dim, interleave, rope_scale, rope_theta)


@flashinfer_api(trace=apply_llama31_rope_trace)
def apply_llama31_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rope` with the frequencies of Llama 3.1.

    A frequency ``f`` whose wavelength fits ``n = old_context_len * f / (2 pi)`` times into the old
    context becomes ``(1 - s) * f / rope_scale + s * f``, where ``s`` rises from 0 at ``n =
    low_freq_factor`` to 1 at ``n = high_freq_factor``.

    Parameters
    ----------
    low_freq_factor, high_freq_factor : float
        Positive, finite, the first less than the second.
    old_context_len : int
        Context of the model before its extension, tokens; positive.
    q, k, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta
        As for `apply_rope`, which also describes results and errors.

    Notes
    -----
    A. Grattafiori et al., "The Llama 3 Herd of Models", 2024, and its released code.
    """
    smoothing = low_freq_factor, high_freq_factor, old_context_len
    return _apply(
        False,
        q,
        k,
        None,
        indptr,
        offsets,
        rotary_dim,
        interleave,
        rope_scale,
        rope_theta,
        smoothing,
    )


@flashinfer_api(trace=apply_llama31_rope_inplace_trace)
def apply_llama31_rope_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    indptr: torch.Tensor,
    offsets: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope` over `q` and `k`, which may share no memory."""
    smoothing = low_freq_factor, high_freq_factor, old_context_len
    _apply(
        True, q, k, None, indptr, offsets, rotary_dim, interleave, rope_scale, rope_theta, smoothing
    )


@flashinfer_api(trace=apply_llama31_rope_pos_ids_trace)
def apply_llama31_rope_pos_ids(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_llama31_rope` with a position for each token, as in `apply_rope_pos_ids`."""
    checks.tensor("pos_ids", pos_ids)
    smoothing = low_freq_factor, high_freq_factor, old_context_len
    return _apply(
        False, q, k, pos_ids, None, None, rotary_dim, interleave, rope_scale, rope_theta, smoothing
    )


@flashinfer_api(trace=apply_llama31_rope_pos_ids_inplace_trace)
def apply_llama31_rope_pos_ids_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    pos_ids: torch.Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope_pos_ids` over `q` and `k`, which may share no memory."""
    checks.tensor("pos_ids", pos_ids)
    smoothing = low_freq_factor, high_freq_factor, old_context_len
    _apply(
        True, q, k, pos_ids, None, None, rotary_dim, interleave, rope_scale, rope_theta, smoothing
    )


@flashinfer_api(trace=apply_rope_with_cos_sin_cache_trace)
def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding with cosines and sines from a cache.

    Parameters
    ----------
    positions : torch.Tensor
        Position of each token, ``[nnz]``, int32 or int64, contiguous. What is rotated by a position
        outside the cache becomes NaN.
    query : torch.Tensor
        ``[nnz, num_qo_heads * head_size]`` or ``[nnz, num_qo_heads, head_size]``, float16, bfloat16
        or float32, last dimension contiguous, other strides free.
    key : torch.Tensor
        ``[nnz, num_kv_heads * head_size]``, or with a dimension of heads as `query`; dtype of
        `query`, last dimension contiguous.
    head_size : int
        Elements of a head.
    cos_sin_cache : torch.Tensor
        ``[max_position, rotary_dim]``, float32, float16 or bfloat16, last dimension contiguous: in
        each row ``rotary_dim / 2`` cosines, then as many sines. `rotary_dim` is even and at most
        `head_size`; the other elements of a head are copied.
    is_neox : bool
        Pairs are ``(j, j + rotary_dim / 2)``; False: ``(2 j, 2 j + 1)``.

    Returns
    -------
    query_out, key_out : torch.Tensor
        Shapes and dtype of `query` and `key`.

    Raises
    ------
    TypeError, ValueError
        As for `apply_rope`.

    Examples
    --------
    >>> q = torch.randn(5, 32 * 128, dtype=torch.bfloat16, device="cuda")
    >>> k = torch.randn(5, 8 * 128, dtype=torch.bfloat16, device="cuda")
    >>> angle = torch.arange(4096.0)[:, None] * 1e4 ** (-torch.arange(64) / 64)
    >>> cache = torch.cat([angle.cos(), angle.sin()], -1).cuda()
    >>> positions = torch.arange(5, device="cuda")
    >>> q, k = flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, 128, cache)
    """
    query_out, key_out = _like(query), _like(key)
    _apply_cached(query_out, key_out, positions, query, key, head_size, cos_sin_cache, is_neox)
    return query_out, key_out


@flashinfer_api(trace=apply_rope_with_cos_sin_cache_inplace_trace)
def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """`apply_rope_with_cos_sin_cache` over `query` and `key`, which may share no memory."""
    _apply_cached(query, key, positions, query, key, head_size, cos_sin_cache, is_neox)


def _apply_cached(
    query_out: torch.Tensor,
    key_out: torch.Tensor,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    table = _cached[checks.flag("is_neox", is_neox)]
    try:
        kernel = table[query.dtype, cos_sin_cache.dtype]
    except NOT_LOADED:
        kernel = table.load(query=query, cos_sin_cache=cos_sin_cache)
    kernel(query_out, key_out, positions, query, key, head_size, cos_sin_cache)
