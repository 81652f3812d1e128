"""What a thread does with a block of 16 or 32 elements: loads, norms, activations, quantisation.

A block is a tensor in registers: of 16 or 32 `Float32`, or of eight `Uint32`, each a packed pair.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, Uint64, cute

from .conversions import (
    bfloat2_habs2,
    bfloat2_hmax2,
    bfloat2_mul,
    bfloat2_to_float2_scaled,
    cvt_f32_to_e4m3,
    cvt_f32_to_ue8m0,
    fabs_f32,
    fdiv_rn,
    fmax_f32,
    habs2,
    half2_mul,
    half2_to_float2_scaled,
    hmax2,
    ue8m0_to_output_scale,
)
from .float4 import (
    cvt_e2m1x8_f32,
    nvfp4_compute_output_scale,
    nvfp4_compute_output_scale_rn,
    nvfp4_scale_from_amax,
    nvfp4_scale_from_amax_rn,
)
from .memory import get_ptr_as_int64, ld_global_v4_u32

BLOCK, PAIRS = 16, 8


@cute.jit
def predicate_k(tXcX: cute.Tensor, limit: int) -> cute.Tensor:
    """Which of a thread's vectors lie before column `limit`.

    `tXcX` has the coordinates of its elements, ``((vector, vectors of a row), rows, columns)``. A
    vector counts as its first element. The result is ``(vectors of a row, rows, columns)``, with a
    stride of 0 along the rows.
    """
    vectors, columns = cute.size(tXcX, mode=[0, 1]), cute.size(tXcX, mode=[2])
    layout = cute.make_layout((vectors, cute.size(tXcX, mode=[1]), columns), stride=(columns, 0, 1))
    inside = cute.make_rmem_tensor(layout, Boolean)
    for vector in cutlass.range_constexpr(vectors):
        for column in cutlass.range_constexpr(columns):
            inside[vector, 0, column] = cute.elem_less(tXcX[(0, vector), 0, column][1], limit)
    return inside


# ---- loads ----


@cute.jit
def _load_8(address: Int64) -> cute.Tensor:
    """Eight words at a multiple of 16 bytes."""
    held = cute.make_rmem_tensor((PAIRS,), Uint32)
    words = (*ld_global_v4_u32(address), *ld_global_v4_u32(address + Int64(16)))
    for i in cutlass.range_constexpr(PAIRS):
        held[i] = words[i]
    return held


@cute.jit
def load_8_half2(mX: cute.Tensor, mW: cute.Tensor, row_offset: Int32, col_offset: Int32, H: int):
    """Sixteen elements of 16 bits of a row, and the weights of these columns, as packed pairs.

    `mX` has dense rows of `H` elements. Places are multiples of 16 bytes.
    """
    x = _load_8(get_ptr_as_int64(mX, Int64(row_offset) * H + Int64(col_offset)))
    return x, _load_8(get_ptr_as_int64(mW, col_offset))


@cute.jit
def load_f32_16_from_smem(sH: cute.Tensor, row_idx: Int32, col_offset: Int32) -> cute.Tensor:
    """Sixteen numbers of a row in shared memory."""
    held = cute.make_rmem_tensor((BLOCK,), Float32)
    for i in cutlass.range_constexpr(BLOCK):
        held[i] = sH[row_idx, col_offset + i]
    return held


# ---- packed pairs ----


def _pairwise(multiply):
    """A product of two blocks."""

    @cute.jit
    def product(x_h2: cute.Tensor, w_h2: cute.Tensor) -> cute.Tensor:
        held = cute.make_rmem_tensor((PAIRS,), Uint32)
        for i in cutlass.range_constexpr(PAIRS):
            held[i] = multiply(x_h2[i], w_h2[i])
        return held

    return product


def _largest(absolute, larger):
    """The largest magnitudes of a block's first and second halves of pairs, as a pair."""

    @cute.jit
    def largest(xw_h2: cute.Tensor) -> Uint32:
        found = absolute(xw_h2[0])
        for i in cutlass.range_constexpr(1, PAIRS):
            found = larger(found, absolute(xw_h2[i]))
        return found

    return largest


def _widened(to_float2):
    """A block as sixteen `Float32`, times a scale."""

    @cute.jit
    def widened(xw_h2: cute.Tensor, scale: Float32) -> cute.Tensor:
        held = cute.make_rmem_tensor((BLOCK,), Float32)
        for i in cutlass.range_constexpr(PAIRS):
            held[2 * i], held[2 * i + 1] = to_float2(xw_h2[i], scale)
        return held

    return widened


half2_mul_8, bfloat2_mul_8 = _pairwise(half2_mul), _pairwise(bfloat2_mul)
half2_max_abs_8, bfloat2_max_abs_8 = _largest(habs2, hmax2), _largest(bfloat2_habs2, bfloat2_hmax2)
half2_to_float16 = _widened(half2_to_float2_scaled)
bfloat2_to_float16 = _widened(bfloat2_to_float2_scaled)


# ---- float32 ----


def _max_abs(count: int):
    """The largest magnitude of a block; NaN counts as nothing."""

    @cute.jit
    def largest(values: cute.Tensor) -> Float32:
        found = Float32(0.0)
        for i in cutlass.range_constexpr(count):
            found = fmax_f32(found, fabs_f32(values[i]))
        return found

    return largest


max_abs_16, max_abs_32 = _max_abs(16), _max_abs(32)


@cute.jit
def compute_y_and_max_abs_f32(h_f32: cute.Tensor, w_f32: cute.Tensor, rstd: Float32):
    """The rows' factor and the weights applied to a block, and the largest magnitude of that."""
    y = cute.make_rmem_tensor((BLOCK,), Float32)
    for i in cutlass.range_constexpr(BLOCK):
        y[i] = h_f32[i] * rstd * w_f32[i]
    return y, max_abs_16(y)


@cute.jit
def silu_mul_16(gate: cute.Tensor, up: cute.Tensor) -> cute.Tensor:
    """``gate / (1 + exp(-gate)) * up``."""
    held = cute.make_rmem_tensor((BLOCK,), Float32)
    for i in cutlass.range_constexpr(BLOCK):
        held[i] = gate[i] / (Float32(1.0) + cute.math.exp(-gate[i])) * up[i]
    return held


@cute.jit
def relu2_16(x: cute.Tensor) -> cute.Tensor:
    """The squares of what is not negative, and 0."""
    held = cute.make_rmem_tensor((BLOCK,), Float32)
    for i in cutlass.range_constexpr(BLOCK):
        positive = fmax_f32(x[i], Float32(0.0))
        held[i] = positive * positive
    return held


# ---- 4-bit codes ----


@cute.jit
def _codes_of_16(values: cute.Tensor, first: cutlass.Constexpr[int], factor: Float32) -> Uint64:
    """The codes of sixteen products, the first in the lowest four bits."""
    low = cvt_e2m1x8_f32(*(values[first + i] * factor for i in range(8)))
    high = cvt_e2m1x8_f32(*(values[first + 8 + i] * factor for i in range(8)))
    return Uint64(low) | (Uint64(high) << Uint64(32))


@cute.jit
def quantize_and_pack_16(y_f32: cute.Tensor, inv_scale: Float32) -> Uint64:
    """The codes of sixteen values times `inv_scale`, the first in the lowest four bits."""
    return _codes_of_16(y_f32, 0, inv_scale)


quantize_and_pack_16_fast = quantize_and_pack_16


@cute.jit
def quantize_and_pack_32(values: cute.Tensor, inv_scale: Float32):
    """The same of 32 values, in two words of 64 bits."""
    return _codes_of_16(values, 0, inv_scale), _codes_of_16(values, BLOCK, inv_scale)


@cute.jit
def quantize_block_fp4(values: cute.Tensor, max_abs: Float32, global_scale_val: Float32):
    """A block of NVFP4: sixteen codes, and the scale's code in e4m3.

    `max_abs` is the block's largest magnitude. A value is ``code * scale / global_scale_val``.
    """
    scale = cvt_f32_to_e4m3(nvfp4_scale_from_amax_rn(max_abs, global_scale_val))
    factor = nvfp4_compute_output_scale_rn(scale, global_scale_val, max_abs)
    return quantize_and_pack_16(values, factor), Uint8(scale)


@cute.jit
def quantize_block_fp4_fast(values: cute.Tensor, max_abs: Float32, global_scale_val: Float32):
    """The same with approximate reciprocals."""
    scale = cvt_f32_to_e4m3(nvfp4_scale_from_amax(max_abs, global_scale_val))
    factor = nvfp4_compute_output_scale(scale, global_scale_val)
    return quantize_and_pack_16(values, factor), Uint8(scale)


@cute.jit
def quantize_block_mxfp4(values: cute.Tensor, max_abs: Float32):
    """A block of MXFP4: 32 codes in two words, and the exponent of the scale, rounded up."""
    scale = cvt_f32_to_ue8m0(fdiv_rn(max_abs, Float32(6.0)))
    low, high = quantize_and_pack_32(values, ue8m0_to_output_scale(scale))
    return low, high, Uint8(scale)


@cute.jit
def silu_mul_quantize_block_fp4(gate: cute.Tensor, up: cute.Tensor, global_scale_val: Float32):
    """`quantize_block_fp4` of `silu_mul_16`."""
    values = silu_mul_16(gate, up)
    return quantize_block_fp4(values, max_abs_16(values), global_scale_val)


@cute.jit
def relu2_quantize_block_fp4(x: cute.Tensor, global_scale_val: Float32):
    """`quantize_block_fp4` of `relu2_16`."""
    values = relu2_16(x)
    return quantize_block_fp4(values, max_abs_16(values), global_scale_val)
