"""Quantisation of several matrices, such as the rows of experts: NVFP4 and MXFP8."""

import math
from collections.abc import Callable

import torch

from .._common import checks
from .._common.dtypes import FLOAT
from .._instrument.decorator import flashinfer_api
from ..tllm_enums import SfLayout
from ..trace.templates.grouped_quantization import (
    mxfp8_grouped_quantize_trace,
    nvfp4_batched_quantize_trace,
    scaled_fp4_grouped_quantize_trace,
    silu_and_mul_scaled_nvfp4_experts_quantize_trace,
)
from .fp4 import _refuse, nvfp4_quantize, silu_and_mul_nvfp4_quantize
from .fp8 import mxfp8_quantize
from .layout import padded_shape

Quantize = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_TILES = SfLayout.layout_128x4
_TILE_ROWS, _TILE_COLUMNS = padded_shape(_TILES, 1, 1)
_NVFP4_BLOCK, _MX_BLOCK, _MX_COLUMNS = 16, 32, 128
_NVFP4_BYTES, _MX_BYTES = _NVFP4_BLOCK // 2, _MX_BLOCK  # of a block's codes


@flashinfer_api(trace=nvfp4_batched_quantize_trace)
def nvfp4_batched_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor,
    sf_vec_size: int = 16,
    nvfp4_4over6: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise matrices to NVFP4: `nvfp4_quantize` of each.

    Parameters
    ----------
    a : torch.Tensor
        ``[B, M, K]``, float16, bfloat16 or float32, last dimension contiguous, rows at equal
        distances; K is a multiple of 16.
    a_global_sf : torch.Tensor
        float32 on the GPU: one for all, or ``[B]``.
    sf_vec_size : {16}
        Elements of a block.
    nvfp4_4over6 : None
        Blocks scaled to 4 instead of 6 are not supported.

    Returns
    -------
    x_q : torch.Tensor
        ``[B, M, K / 2]``, uint8: two codes a byte, the first one in the lower bits.
    sf : torch.Tensor
        ``[B, M' * K']``, uint8, in the layout ``SfLayout.layout_128x4`` for each matrix: M'
        is M rounded up to a multiple of 128, K' is K / 16 rounded up to a multiple of 4.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.

    Notes
    -----
    NVIDIA, "Pretraining Large Language Models with NVFP4", 2025. One launch for all matrices where
    M is a multiple of 128 and they share a global scale, else one for each.
    """
    checks.choice("sf_vec_size", sf_vec_size, (_NVFP4_BLOCK,))
    _refuse(nvfp4_4over6=nvfp4_4over6)
    _check_matrices(a, _NVFP4_BLOCK)
    return _quantize_each(nvfp4_quantize, a, _per_matrix(a, a_global_sf), _NVFP4_BYTES)


@flashinfer_api(trace=scaled_fp4_grouped_quantize_trace)
def scaled_fp4_grouped_quantize(
    a: torch.Tensor,
    mask: torch.Tensor,
    a_global_sf: torch.Tensor,
    nvfp4_4over6: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the first rows of matrices to NVFP4, as masked grouped products take them.

    Parameters
    ----------
    a, a_global_sf, nvfp4_4over6
        As for `nvfp4_batched_quantize`.
    mask : torch.Tensor
        ``[B]``, int32, on the device of `a`: how many rows of each matrix count. The others are
        taken as zeros, whatever they hold. Less than 0 counts as 0, and more than M as M.

    Returns
    -------
    x_q : torch.Tensor
        ``[M, K / 2, B]``, uint8: a view of contiguous ``[B, M, K / 2]``.
    sf : torch.Tensor
        ``[32, 4, M' / 128, 4, K' / 4, B]``, float8_e4m3fn: a view of the contiguous tiles
        ``[B, M' / 128, K' / 4, 32, 4, 4]`` of `nvfp4_batched_quantize`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.
    """
    _refuse(nvfp4_4over6=nvfp4_4over6)
    _check_matrices(a, _NVFP4_BLOCK)
    rows = _counted(a, mask)
    scale = _per_matrix(a, a_global_sf)
    codes, scales = _quantize_each(nvfp4_quantize, rows, scale, _NVFP4_BYTES)
    return _batch_last(codes, scales.view(torch.float8_e4m3fn), a.shape[2] // _NVFP4_BLOCK)


@flashinfer_api(trace=silu_and_mul_scaled_nvfp4_experts_quantize_trace)
def silu_and_mul_scaled_nvfp4_experts_quantize(
    a: torch.Tensor,
    mask: torch.Tensor,
    a_global_sf: torch.Tensor,
    nvfp4_4over6: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu_and_mul`, rounded to the dtype of `a`, and `scaled_fp4_grouped_quantize` in one pass.

    Parameters
    ----------
    a : torch.Tensor
        ``[B, M, 2 * K]``: gate, then up. Otherwise as for `scaled_fp4_grouped_quantize`, as are the
        other arguments, the errors and the result for ``[B, M, K]``.
    """
    _refuse(nvfp4_4over6=nvfp4_4over6)
    _check_matrices(a, 2 * _NVFP4_BLOCK)
    rows = _counted(a, mask)
    scale = _per_matrix(a, a_global_sf)
    codes, scales = _quantize_each(silu_and_mul_nvfp4_quantize, rows, scale, _NVFP4_BYTES)
    return _batch_last(codes, scales.view(torch.float8_e4m3fn), a.shape[2] // 2 // _NVFP4_BLOCK)


@flashinfer_api(trace=mxfp8_grouped_quantize_trace)
def mxfp8_grouped_quantize(
    a: torch.Tensor, mask: torch.Tensor, backend: str = "cutile"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the first rows of matrices to MXFP8, as masked grouped products take them.

    Parameters
    ----------
    a : torch.Tensor
        ``[B, M, K]``, float16, bfloat16 or float32, last dimension contiguous; K is a multiple of
        32.
    mask : torch.Tensor
        As for `scaled_fp4_grouped_quantize`.
    backend : {"cutile", "cake"}
        Both mean the same kernel here; they are the names that callers of FlashInfer use.

    Returns
    -------
    x_q : torch.Tensor
        ``[M, K', B]``, float8_e4m3fn: a view of contiguous ``[B, M, K']``; K' is K rounded up to a
        multiple of 128, with zeros.
    sf : torch.Tensor
        ``[32, 4, M' / 128, 4, K' / 128, B]``, uint8, exponents plus 127: a view of contiguous tiles
        ``[B, M' / 128, K' / 128, 32, 4, 4]``; M' is M rounded up to a multiple of 128.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as listed above.

    Notes
    -----
    Codes and scales are those of `mxfp8_quantize` for each matrix.
    """
    checks.choice("backend", backend, ("cutile", "cake"))
    _check_matrices(a, _MX_BLOCK)

    def quantize(rows: torch.Tensor, _: object) -> tuple[torch.Tensor, torch.Tensor]:
        return mxfp8_quantize(rows, alignment=_MX_COLUMNS)

    codes, scales = _quantize_each(quantize, _counted(a, mask), None, _MX_BYTES)
    return _batch_last(codes, scales, codes.shape[2] // _MX_BLOCK)


def _check_matrices(a: torch.Tensor, width: int) -> None:
    checks.tensor("a", a, 3)
    checks.matrix("a", a, width)
    checks.dtype("a", a.dtype, FLOAT)
    if a.shape[2] > 1 and a.stride(2) != 1:
        raise ValueError(f"`a` must have a contiguous last dimension, got strides {a.stride()}")
    checks.cuda_tensors(a=a)


def _per_matrix(a: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    checks.tensor("a_global_sf", scale)
    if not scale.is_floating_point():
        raise ValueError(f"`a_global_sf` must have dtype float32, got {scale.dtype}")
    if scale.numel() not in (1, a.shape[0]):
        raise ValueError(
            f"`a_global_sf` must have 1 element, or {a.shape[0]} as `a` has matrices, got shape "
            f"{list(scale.shape)}"
        )
    if scale.device != a.device:
        raise ValueError(f"`a_global_sf` must be on {a.device}, got {scale.device}")
    return scale


def _counted(a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`a` with zeros in the rows that do not count. The host does not look at the counts."""
    checks.tensor("mask", mask, 1)
    checks.dtype("mask", mask.dtype, (torch.int32,))
    if mask.shape[0] != a.shape[0] or mask.device != a.device:
        raise ValueError(
            f"`mask` must have {a.shape[0]} elements on {a.device}, got {mask.shape[0]} on "
            f"{mask.device}"
        )
    counts = torch.arange(a.shape[1], device=a.device) < mask[:, None]
    return torch.where(counts[..., None], a, 0)


def _quantize_each(
    quantize: Quantize, matrices: torch.Tensor, scale: torch.Tensor | None, block_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[B, M, ...]`` and the scales of each matrix, ``[B, M' * K']``."""
    batch, rows = matrices.shape[:2]
    shares_scale = scale is None or scale.numel() == 1
    if batch == 0 or (rows % _TILE_ROWS == 0 and shares_scale):  # no tile has rows of two
        one = scale if shares_scale else matrices.new_ones(1, dtype=torch.float32)
        codes, scales = quantize(matrices, one)
    else:
        parts = [
            quantize(
                matrix, scale if scale is None or shares_scale else scale.reshape(-1)[i : i + 1]
            )
            for i, matrix in enumerate(matrices)
        ]
        codes, scales = (torch.stack(part) for part in zip(*parts, strict=True))
    padded = padded_shape(_TILES, rows, codes.shape[2] // block_bytes)
    return codes, scales.reshape(batch, math.prod(padded))


def _batch_last(
    codes: torch.Tensor, scales: torch.Tensor, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views with the matrices last, of codes and of tiles of scales."""
    rows, columns = padded_shape(_TILES, codes.shape[1], blocks)
    tiles = rows // _TILE_ROWS, columns // _TILE_COLUMNS
    shape = (codes.shape[0], *tiles, _TILE_ROWS // 4, 4, _TILE_COLUMNS)
    return codes.permute(1, 2, 0), scales.view(shape).permute(3, 4, 1, 5, 2, 0)
