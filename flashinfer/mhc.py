"""Hyper-connections of four streams: what mixes them before a layer, and what adds its output.

A model with hyper-connections (DeepSeek-V4) has four residual streams for each token. Before a
layer `mhc_pre_big_fuse` mixes them into the layer's input; after it `mhc_post` mixes them among one
another and adds the layer's output. The weights are a token's own: a projection of its streams
gives 24 numbers, 4 of *pre*, 4 of *post* and 4 x 4 of *comb*.
"""

from typing import cast

import torch

from ._common import checks
from ._common.kernels import NOT_LOADED, Kernel, KernelTable
from ._instrument.decorator import flashinfer_api
from .jit.mhc import MhcPostConfig, MhcPreConfig, gen_mhc_post_module, gen_mhc_pre_module
from .trace.templates.mhc import (
    mhc_post_trace,
    mhc_pre_big_fuse_trace,
    mhc_pre_big_fuse_with_prenorm_trace,
)

__all__ = ["mhc_post", "mhc_pre_big_fuse", "mhc_pre_big_fuse_with_prenorm"]


def _get_post_kernel(dtype: torch.dtype) -> Kernel:
    return cast(Kernel, gen_mhc_post_module(MhcPostConfig(dtype)).build_and_load().mhc_post)


def _get_pre_kernel(dtype: torch.dtype, prenorm: bool) -> Kernel:
    return cast(Kernel, gen_mhc_pre_module(MhcPreConfig(dtype, prenorm)).build_and_load().mhc_pre)


_post_kernels = KernelTable(_get_post_kernel)
_pre_kernels = KernelTable(_get_pre_kernel)


@flashinfer_api(trace=mhc_post_trace)
def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
) -> torch.Tensor:
    """Mix the streams among one another and add a layer's output to each.

    ``out[..., n, :] = post_layer_mix[..., n] * x + sum over m of comb_res_mix[..., m, n] *
    residual[..., m, :]``, in float32, rounded once.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., hidden]``: the layer's output. Dtype of `residual`.
    residual : torch.Tensor
        ``[..., 4, hidden]``, float16 or bfloat16; hidden is a multiple of 8. One to six leading
        dimensions, which the other tensors have as well. All tensors are contiguous and begin on 16
        bytes.
    post_layer_mix : torch.Tensor
        ``[..., 4]`` or ``[..., 4, 1]``, float32.
    comb_res_mix : torch.Tensor
        ``[..., 4, 4]``, float32: from stream, to stream.

    Returns
    -------
    torch.Tensor
        New, shape and dtype of `residual`.

    Raises
    ------
    TypeError
        If an argument is not a tensor.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype or stride not listed above.

    Notes
    -----
    From Z. Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025.
    """
    out = torch.empty_like(checks.tensor("residual", residual))
    try:
        kernel = _post_kernels[residual.dtype]
    except NOT_LOADED:
        kernel = _post_kernels.load(residual=residual)
    kernel(out, x, residual, post_layer_mix, comb_res_mix)
    return out


@flashinfer_api(trace=mhc_pre_big_fuse_trace)
def mhc_pre_big_fuse(
    dot_mix: torch.Tensor,
    sqrsum: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    k: int,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    num_splits: int = 1,
    block_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make a token's weights from their projection, and the layer's input from the streams.

    With the sums of `dot_mix` and `sqrsum` over their splits, ``mix = dot_mix / sqrt(sqrsum / k +
    rms_eps) * scale + base``, where pre, post and comb have a number of `mhc_scale` each. Then
    ``layer_input = sum over m of (sigmoid(mix of pre)[m] + mhc_pre_eps) * residual[..., m, :]``,
    ``post_mix = mhc_post_mult_value * sigmoid(mix of post)``, and `comb_mix` is the softmax of the
    rows of comb plus `mhc_sinkhorn_eps`, whose columns and rows are divided by their sums plus
    `mhc_sinkhorn_eps` in turns, columns `sinkhorn_repeat` times and rows in between.

    Parameters
    ----------
    dot_mix : torch.Tensor
        ``[num_splits, ..., 24]``, float32, or ``[..., 24]`` if `num_splits` is 1: the projection of
        the streams, in parts that are added here.
    sqrsum : torch.Tensor
        ``[num_splits, ...]`` or ``[...]``, as `dot_mix`; float32: sum of the squares that were
        projected.
    residual : torch.Tensor
        ``[..., 4, hidden]``, float16 or bfloat16; hidden is a multiple of 8. One to six leading
        dimensions. All tensors are contiguous, this one begins on 16 bytes.
    mhc_scale : torch.Tensor
        ``[3]``, float32.
    mhc_base : torch.Tensor
        ``[24]``, float32.
    k : int
        The number of elements whose squares each sum has.
    rms_eps, mhc_pre_eps, mhc_sinkhorn_eps : float
        See above; finite, not negative.
    mhc_post_mult_value : float
        See above; finite.
    sinkhorn_repeat : int
        1 to 1000.
    num_splits : int
        1 to 1024.
    block_size : int
        Threads for a token: a multiple of 32 from 64 to 1024, or 0 for what suits the sizes.

    Returns
    -------
    tuple of torch.Tensor
        `post_mix`, ``[..., 4, 1]``, float32; `comb_mix`, ``[..., 4, 4]``, float32; `layer_input`,
        ``[..., hidden]``, dtype of `residual`.

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor, or a number not a number.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype or stride not listed above, or a number
        is out of its range.

    Notes
    -----
    From Z. Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025; the epsilons are those
    of DeepSeek-V4.
    """
    results = _empty_results(residual)
    _pre_kernel(residual, False)(
        results,
        dot_mix,
        sqrsum,
        residual,
        mhc_scale,
        mhc_base,
        k,
        (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps),
        mhc_post_mult_value,
        sinkhorn_repeat,
        num_splits,
        block_size,
    )
    return results


@flashinfer_api(trace=mhc_pre_big_fuse_with_prenorm_trace)
def mhc_pre_big_fuse_with_prenorm(
    dot_mix: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    block_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `mhc_pre_big_fuse`, with the sum of squares of a token's streams made here.

    Parameters
    ----------
    dot_mix : torch.Tensor
        ``[..., 24]`` or ``[1, ..., 24]``, float32, contiguous.
    residual, mhc_scale, mhc_base
        As for `mhc_pre_big_fuse`; ``k`` is ``4 * hidden``.
    rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, mhc_post_mult_value, sinkhorn_repeat, block_size
        As for `mhc_pre_big_fuse`.

    Returns
    -------
    tuple of torch.Tensor
        `post_mix`, `comb_mix` and `layer_input`, as of `mhc_pre_big_fuse`.

    Raises
    ------
    TypeError
        If a tensor argument is not a tensor, or a number not a number.
    ValueError
        If a tensor is not on the GPU or has a shape, dtype or stride not listed above, or a number
        is out of its range.
    """
    results = _empty_results(residual)
    _pre_kernel(residual, True)(
        results,
        dot_mix,
        residual,
        mhc_scale,
        mhc_base,
        (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps),
        mhc_post_mult_value,
        sinkhorn_repeat,
        block_size,
    )
    return results


def _pre_kernel(residual: torch.Tensor, prenorm: bool) -> Kernel:
    try:
        return _pre_kernels[residual.dtype, prenorm]
    except NOT_LOADED:
        return _pre_kernels.load(prenorm, residual=residual)


def _empty_results(residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    leading = checks.tensor("residual", residual).shape[:-2]
    return (
        torch.empty((*leading, 4, 1), dtype=torch.float32, device=residual.device),
        torch.empty((*leading, 4, 4), dtype=torch.float32, device=residual.device),
        torch.empty((*leading, *residual.shape[-1:]), dtype=residual.dtype, device=residual.device),
    )
