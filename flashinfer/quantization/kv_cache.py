"""4-bit caches (NVFP4): rows of keys and values quantised, and read back."""

import functools
import math
from typing import Any

import torch

from .._common import checks
from .._common.cache_layout import is_hnd, of_pages, split_cache
from .._common.conversions import as_dtype, is_convertible
from .._common.dtypes import check_dtype
from .._common.kernels import NOT_LOADED, Kernel, KernelTable
from .._instrument.decorator import flashinfer_api
from ..jit.quantization import KVFloat4Config, gen_kv_float4_module
from ..trace.templates.kv_float4 import (
    nvfp4_kv_dequantize_paged_trace,
    nvfp4_kv_dequantize_trace,
    nvfp4_kv_quantize_trace,
)
from ._kernels import group_quant_kernel
from .fp4 import fp4_quantize

_FLOAT16 = (torch.float16, torch.bfloat16)


def _table(function: str) -> KernelTable:
    def get_kernel(dtype: torch.dtype) -> Kernel:
        kernel: Kernel = getattr(_module(dtype), function)
        return kernel

    return KernelTable(get_kernel)


@functools.cache
def _module(dtype: torch.dtype) -> Any:
    return gen_kv_float4_module(KVFloat4Config(dtype)).build_and_load()


_dequantize_paged = _table("kv_float4_dequantize_paged")


@flashinfer_api(trace=nvfp4_kv_quantize_trace)
def nvfp4_kv_quantize(
    input: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to 4 bits (NVFP4) with the scales of a cache.

    A block of 16 elements has a scale, ``amax / 6 / g`` rounded to E4M3, and codes
    ``x / (scale * g)`` rounded to E2M1: ``x = code * scale * g``. `fp4_quantize` takes 1 / g.

    Parameters
    ----------
    input : torch.Tensor
        ``[m, k]``, float16 or bfloat16, last dimension contiguous; k is a multiple of 16.
    global_scale : torch.Tensor
        g, one float32 on the GPU, positive; another floating dtype is converted.

    Returns
    -------
    fp4_output : torch.Tensor
        ``[m, k / 2]`` uint8, two codes a byte, the first in the lower bits.
    block_scales : torch.Tensor
        ``[m, k / 16]`` uint8, the bits of E4M3 numbers, row by row.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    NVIDIA, "Pretraining Large Language Models with NVFP4", 2025. A NaN makes the scale of its block
    NaN; infinities saturate.

    Examples
    --------
    >>> k = torch.randn(40, 128, dtype=torch.bfloat16, device="cuda")
    >>> codes, scales = flashinfer.nvfp4_kv_quantize(k, torch.ones(1, device="cuda"))
    >>> codes.shape, scales.shape
    (torch.Size([40, 64]), torch.Size([40, 8]))
    """
    checks.tensor("input", input, 2)
    check_dtype("input", input.dtype, _FLOAT16)
    checks.matrix("input", input, 16)
    kernel = group_quant_kernel(input, "e2m1", "e4m3", "linear", 16, False)
    global_scale = _as_float32(checks.tensor("global_scale", global_scale))
    rows, columns = input.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=input.device)
    scales = torch.empty(rows, columns // 16, dtype=torch.uint8, device=input.device)
    kernel(codes, scales, input, global_scale, 1.0, True, None, False)
    return codes, scales


@flashinfer_api(trace=nvfp4_kv_dequantize_trace)
def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Undo `nvfp4_kv_quantize`: ``code * scale * g``, rounded once.

    Parameters
    ----------
    fp4_data : torch.Tensor
        ``[m, k / 2]`` uint8, last dimension contiguous, rows at multiples of 8 bytes; k is a
        multiple of 16.
    block_scales : torch.Tensor
        ``[m, k / 16]``, uint8 or float8_e4m3fn, last dimension contiguous.
    global_scale : torch.Tensor
        g, one float32 on the GPU; another floating dtype is converted.
    output_dtype : torch.dtype
        bfloat16 or float16.

    Returns
    -------
    torch.Tensor
        ``[m, k]`` of `output_dtype`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.
    """
    checks.tensor("fp4_data", fp4_data, 2)
    checks.dtype("output_dtype", output_dtype, _FLOAT16)
    if not fp4_data.is_cuda:
        raise ValueError(f"`fp4_data` must be a CUDA tensor, got one on {fp4_data.device}")
    global_scale = _as_float32(checks.tensor("global_scale", global_scale))
    shape = (fp4_data.shape[0], 2 * fp4_data.shape[1])
    out = torch.empty(shape, dtype=output_dtype, device=fp4_data.device)
    _module(output_dtype).kv_float4_dequantize(out, fp4_data, block_scales, global_scale)
    return out


@flashinfer_api
def nvfp4_quantize_paged_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_layout: str = "HND",
    k_global_sf: torch.Tensor | None = None,
    v_global_sf: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], float, float]:
    """Quantise a whole cache to 4 bits (NVFP4), as attention with `kv_cache_sf` takes it.

    A block of 16 elements has a scale, ``g * amax / 6`` rounded to E4M3, and codes
    ``x * g / scale`` rounded to E2M1: ``x = code * scale / g``.

    Parameters
    ----------
    k_cache, v_cache : torch.Tensor
        ``[num_pages, num_kv_heads, page_size, head_dim]`` (``"HND"``) or ``[num_pages, page_size,
        num_kv_heads, head_dim]`` (``"NHD"``), float16 or bfloat16, of any strides; head_dim is a
        multiple of 16.
    kv_layout : str
        Order of the dimensions, which the results have too.
    k_global_sf, v_global_sf : torch.Tensor, optional
        g, one float32 on the GPU, positive; by default ``448 / amax`` of the whole cache, or 1 for
        a cache of zeros.

    Returns
    -------
    kv_cache : tuple of torch.Tensor
        Codes of keys and of values, uint8, ``[..., head_dim / 2]``, two a byte, the first one in
        the lower bits.
    kv_cache_sf : tuple of torch.Tensor
        Their scales, float8_e4m3fn, ``[..., head_dim / 16]``, row by row.
    k_scale, v_scale : float
        ``1 / g``: what attention takes by these names. The host waits for the GPU.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    NVIDIA, "Pretraining Large Language Models with NVFP4", 2025. FlashInfer puts the scales of
    values in an order of TensorRT-LLM's kernels for Blackwell; no kernel here reads that.
    """
    is_hnd(kv_layout)
    parts = []
    given = (("k", k_cache, k_global_sf), ("v", v_cache, v_global_sf))
    for name, cache, factor in given:
        checks.tensor(f"{name}_cache", cache, 4)
        checks.matrix(f"{name}_cache", cache, 16)
        check_dtype(f"{name}_cache", cache.dtype, _FLOAT16)
        if cache.shape[:3] != k_cache.shape[:3] or cache.dtype != k_cache.dtype:
            raise ValueError(
                f"`v_cache` must be {k_cache.dtype} of shape {list(k_cache.shape[:3])} and a head, "
                f"got {cache.dtype} of shape {list(cache.shape)}"
            )
        if factor is None:
            factor = _whole_factor(cache)
        elif checks.tensor(f"{name}_global_sf", factor).numel() != 1:
            raise ValueError(
                f"`{name}_global_sf` must have one element, got shape {list(factor.shape)}"
            )
        with checks.named(input=f"{name}_cache", global_scale=f"{name}_global_sf"):
            codes, scales = fp4_quantize(cache.contiguous(), factor, is_sf_swizzled_layout=False)
        shape = (*cache.shape[:3], cache.shape[3] // 16)
        parts.append((codes, scales.view(torch.float8_e4m3fn).view(shape), factor))
    (k, k_sf, k_factor), (v, v_sf, v_factor) = parts
    factors = torch.stack([part.reshape(()).float() for part in (k_factor, v_factor)])
    k_scale, v_scale = (1 / factors).tolist()
    for (name, _, given_factor), scale in zip(given, (k_scale, v_scale), strict=True):
        if given_factor is not None and not 0.0 < scale < math.inf:
            raise ValueError(
                f"`{name}_global_sf` must be positive and finite, got {given_factor.item()}"
            )
    return (k, v), (k_sf, v_sf), k_scale, v_scale


def _whole_factor(cache: torch.Tensor) -> torch.Tensor:
    """The factor that takes the largest number to the largest scale; float32."""
    largest = (
        cache.abs().amax().float() if cache.numel() else cache.new_zeros((), dtype=torch.float32)
    )
    return torch.where(largest > 0, 448.0 / largest, 1.0).reshape(1)


@flashinfer_api(trace=nvfp4_kv_dequantize_paged_trace)
def nvfp4_kv_dequantize_paged(
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Read 4-bit keys and values (NVFP4) of requests through block tables.

    Parameters
    ----------
    paged_kv_cache, kv_cache_sf : torch.Tensor or tuple of torch.Tensor
        As for `nvfp4_quantize_append_paged_kv_cache`. In tuples, heads of keys and of values may
        differ in size.
    block_tables : torch.Tensor
        ``[batch_size, max_pages]``: page numbers of each request, int32; integers of another dtype
        are converted, here and below.
    seq_lens : torch.Tensor
        ``[batch_size]``, int32: tokens of each request.
    k_scale, v_scale : torch.Tensor
        Global scales, one float32 on the GPU each.
    output_k, output_v : torch.Tensor
        ``[batch_size, max_seq_len, num_kv_heads, head_dim]``, float16 or bfloat16, contiguous, with
        the head_dim of keys and of values. Rows from a request's length on, or of pages that do not
        exist, stay as they are.
    kv_layout : str
        ``"NHD"`` or ``"HND"``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.
    """
    hnd = is_hnd(kv_layout)
    caches = (
        *split_cache(of_pages(paged_kv_cache, kv_layout)),
        *split_cache(of_pages(kv_cache_sf, kv_layout), "kv_cache_sf"),
    )
    try:
        kernel = _dequantize_paged[output_k.dtype]
    except NOT_LOADED:
        kernel = _dequantize_paged.load(output_k=output_k)
    scales: list[Any] = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        scales += [_as_float32(checks.tensor(name, scale)), 1.0]
    tables, lengths = (
        as_dtype(x, torch.int32) if is_convertible(x, torch.int32) else x
        for x in (block_tables, seq_lens)
    )
    kernel(output_k, output_v, tables, lengths, caches, tuple(scales), hnd)


def _as_float32(scale: torch.Tensor) -> torch.Tensor:
    return as_dtype(scale, torch.float32) if is_convertible(scale, torch.float32) else scale
