"""A mixture of experts in e4m3 with kernels in CuTe-DSL: products, activation, sum.

Experts have room for as many rows each, of which ``masked_m`` says how many are valid. Scales of
rows are ``[k / 128, experts * rows]``, those of weights ``[experts, n / 128, k / 128]``:

    hidden = moe_grouped_gemm_cutedsl(x, w1, x_scale, w1_scale, masked_m)
    codes, scale = moe_activation(hidden, masked_m)
    rows = moe_grouped_gemm_cutedsl(codes, w2, scale, w2_scale, masked_m)
    moe_finalize(rows.flatten(0, 1), entry_row, weights)
"""

from typing import cast

import torch

from .._common import checks
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._instrument.decorator import flashinfer_api
from ..jit.cute_dsl_moe import (
    GEMM_TILES,
    CuteDslGroupedGemmConfig,
    CuteDslMoeActivationConfig,
    CuteDslMoeFinalizeConfig,
    gemm_tile_for,
    gen_cute_dsl_grouped_gemm_module,
    gen_cute_dsl_moe_activation_module,
    gen_cute_dsl_moe_finalize_module,
)
from ..trace.templates.cute_dsl_moe import (
    moe_activation_trace,
    moe_finalize_trace,
    moe_grouped_gemm_cutedsl_trace,
)

_BLOCK = 128
_LEAST = 1e-10  # magnitude that a scale is made for
_NAMES_OF_MASKED = 4  # what gemm_jit_binding.cc calls the tensors


def _activation_kernel(dtype: torch.dtype) -> Kernel:
    config = CuteDslMoeActivationConfig(dtype)
    return cast(Kernel, gen_cute_dsl_moe_activation_module(config).build_and_load().moe_activation)


def _finalize_kernel(dtype: torch.dtype, out_dtype: torch.dtype, top_k: int) -> Kernel:
    config = CuteDslMoeFinalizeConfig(dtype, out_dtype, top_k)
    return cast(Kernel, gen_cute_dsl_moe_finalize_module(config).build_and_load().moe_combine)


def _gemm_kernel(out_dtype: torch.dtype, tile: int) -> Kernel:
    config = CuteDslGroupedGemmConfig(out_dtype, *GEMM_TILES[tile])
    return cast(Kernel, gen_cute_dsl_grouped_gemm_module(config).build_and_load().gemm)


_activation: KernelTable = KernelTable(_activation_kernel)
_finalize: KernelTable = KernelTable(_finalize_kernel)
_gemm: KernelTable = KernelTable(_gemm_kernel)


@flashinfer_api(trace=moe_activation_trace)
def moe_activation(
    input: torch.Tensor,
    masked_m: torch.Tensor,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU of experts' rows and its quantisation: ``out * scale = silu(gate) * up``.

    Per 128 neighbours ``scale = max(amax, 1e-10) / 448`` with their largest magnitude amax; values
    are computed in float32 and rounded once, to nearest.

    Parameters
    ----------
    input : torch.Tensor
        ``[experts, rows, 2 * width]``, float16 or bfloat16, contiguous: gates, then values. `width`
        is a multiple of 128.
    masked_m : torch.Tensor
        ``[experts]``, int32: valid rows of each expert. The others are neither read nor written.
    out : torch.Tensor, optional
        ``[experts, rows, width]``, float8_e4m3fn, contiguous.
    out_scale : torch.Tensor, optional
        ``[width / 128, experts * rows]``, float32, contiguous.
    enable_pdl : bool, optional
        As for `flashinfer.rmsnorm`.

    Returns
    -------
    out, out_scale : torch.Tensor
        The tensors given, or new ones. They are undefined for rows that are not valid.

    Raises
    ------
    TypeError, ValueError, RuntimeError, flashinfer.jit.JitError
        As for `rmsnorm_cute`.
    """
    checks.matrix("input", checks.tensor("input", input, 3), 2 * _BLOCK)
    experts, rows, columns = input.shape
    if out is None:
        shape = (experts, rows, columns // 2)
        out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=input.device)
    if out_scale is None:
        shape_of_scale = (columns // (2 * _BLOCK), experts * rows)
        out_scale = torch.empty(shape_of_scale, dtype=torch.float32, device=input.device)
    try:
        kernel = _activation[input.dtype]
    except NOT_LOADED:
        kernel = _activation.load(input=input)
    kernel(out, out_scale, input, masked_m, _LEAST, enable_pdl)
    return out, out_scale


@flashinfer_api(trace=moe_finalize_trace)
def moe_finalize(
    rows: torch.Tensor,
    entry_row: torch.Tensor,
    token_final_scales: torch.Tensor,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Weighted sum of each token's rows from its experts.

    ``out[t] = sum_j token_final_scales[t, j] * rows[entry_row[t, j]]``, in float32 and in the order
    of j, so that results repeat bit for bit.

    Parameters
    ----------
    rows : torch.Tensor
        ``[entries, hidden]``, float16 or bfloat16: what the experts made. `hidden` is a multiple of
        8, and rows begin at multiples of 16 bytes.
    entry_row : torch.Tensor
        ``[tokens, top_k]``, int32, contiguous, at most 32 columns; a number that is not one of 0 to
        ``entries - 1`` stands for no row.
    token_final_scales : torch.Tensor
        ``[tokens, top_k]``, float32, contiguous: the router's weights.
    out : torch.Tensor, optional
        ``[tokens, hidden]``, float16, bfloat16 or float32; by default of the dtype of `rows`.
    enable_pdl : bool, optional
        As for `flashinfer.rmsnorm`.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor.

    Raises
    ------
    TypeError, ValueError, RuntimeError, flashinfer.jit.JitError
        As for `rmsnorm_cute`.
    """
    checks.tensor("rows", rows, 2)
    checks.tensor("entry_row", entry_row, 2)
    if out is None:
        out = torch.empty((entry_row.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
    top_k = entry_row.shape[1]
    try:
        kernel = _finalize[rows.dtype, out.dtype, top_k]
    except NOT_LOADED:
        kernel = _finalize.load(top_k, rows=rows, out=out)
    kernel(out, rows, entry_row, token_final_scales, False, enable_pdl)
    return out


@flashinfer_api(trace=moe_grouped_gemm_cutedsl_trace)
def moe_grouped_gemm_cutedsl(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    masked_m: torch.Tensor,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    expected_m: int | None = None,
) -> torch.Tensor:
    """Products of experts' rows with their weights: ``out[g, r] = a[g, r] @ b[g].T``, in 8 bits.

    Parameters
    ----------
    a : torch.Tensor
        ``[experts, rows, k]``, float8_e4m3fn, k contiguous and a multiple of 128.
    b : torch.Tensor
        ``[experts, n, k]``, float8_e4m3fn, k contiguous, at most 1024 experts; n is even.
    a_scale : torch.Tensor
        ``[k / 128, experts * rows]``, float32, contiguous: what a row's 128 neighbours are
        multiplied by.
    b_scale : torch.Tensor
        ``[experts, ceil(n / 128), k / 128]``, float32: of blocks of 128 x 128.
    masked_m : torch.Tensor
        ``[experts]``, int32 or int64: valid rows of each expert. The others are not written.
    out : torch.Tensor, optional
        ``[experts, rows, n]``, bfloat16, float16 or float32; by default a new one in bfloat16.
    enable_pdl : bool, optional
        As for `flashinfer.rmsnorm`.
    expected_m : int, optional
        Rows that an expert typically has: what the tile is chosen for. It changes no result beyond
        rounding; None stands for all that it has room for.

    Returns
    -------
    torch.Tensor
        `out`, or a new tensor; rows that are not valid are undefined.

    Raises
    ------
    TypeError, ValueError, RuntimeError, flashinfer.jit.JitError
        As for `rmsnorm_cute`.

    Notes
    -----
    Tensor cores add 128 products in less than float32 precision; sums of blocks are in float32.
    """
    checks.tensor("a", a, 3)
    checks.tensor("b", b, 3)
    experts, rows, k = a.shape
    wanted = (k // _BLOCK, experts * rows)
    if tuple(checks.contiguous("a_scale", a_scale, 2).shape) != wanted:
        raise ValueError(f"`a_scale` must have shape {list(wanted)}, got {list(a_scale.shape)}")
    if out is None:
        out = torch.empty((experts, rows, b.shape[1]), dtype=torch.bfloat16, device=a.device)
    expected = rows if expected_m is None else min(checks.count("expected_m", expected_m), rows)
    tile = gemm_tile_for(expected)
    try:
        kernel = _gemm[out.dtype, tile]
    except NOT_LOADED:
        kernel = _gemm.load(tile, out=out)
    by_row = a_scale.view(wanted[0], experts, rows).permute(1, 2, 0)
    groups = (checks.tensor("masked_m", masked_m), None, None, None)
    scales = (by_row, b_scale, None)
    kernel(_NAMES_OF_MASKED, out, a, b, scales, None, 1.0, groups, None, 0, 0, enable_pdl)
    return out
