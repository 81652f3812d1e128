"""Conversions to and from 4-bit floats (e2m1), by arithmetic on integers and float16.

Blackwell has instructions for them; these run on every GPU. A code has a sign in its bit 3 and one
of 0, 0.5, 1, 1.5, 2, 3, 4, 6 in the others. Scales of NVFP4 are e4m3 codes, those of MXFP4 are
powers of two.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32, cute

from .conversions import (
    cvt_e4m3x4_to_f32x4,
    cvt_f32x4_to_e4m3x4,
    fdiv_rn,
    fmul_rn,
    fp8_e4m3_to_f32,
    half2_mul,
    half2_to_float2_scaled,
    rcp_approx_ftz,
)


def _ptx(code: str, results, *operands):
    """One result of a few instructions."""
    return cute.arch.inline_ptx(code, write_only_types=results, read_only_args=list(operands))


# ---- to 4 bits ----


@cute.jit
def cvt_f32_to_e2m1(a: Float32) -> Uint32:
    """The code of a value in the lowest four bits: to nearest, then to even; beyond 6 that of 6.

    The code of numbers from 1 on holds the exponent and the first bit of the fraction. Below, it
    counts steps of 0.5, as float32 has them at 2^22. NaN becomes 6, with its sign.
    """
    code = """{
        .reg .b32 bits, sign, normal, odd, below;
        .reg .f32 value, sum;
        .reg .pred small;
        mov.b32 bits, {$r0};
        shr.u32 sign, bits, 28;
        and.b32 sign, sign, 8;
        abs.f32 value, {$r0};
        min.f32 value, value, 0f40C00000;
        add.rn.f32 sum, value, 0f4A800000;
        mov.b32 below, sum;
        sub.u32 below, below, 0x4A800000;
        mov.b32 normal, value;
        bfe.u32 odd, normal, 22, 1;
        add.u32 normal, normal, odd;
        add.u32 normal, normal, 0x1FFFFF;
        shr.u32 normal, normal, 22;
        sub.u32 normal, normal, 252;
        setp.lt.f32 small, value, 0f3F800000;
        selp.b32 normal, below, normal, small;
        or.b32 {$w0}, normal, sign;
    }"""
    return _ptx(code, [Uint32], a)


@cute.jit
def cvt_fp32x2_to_e2m1x2(v0: Float32, v1: Float32) -> Uint32:
    """Two codes in a byte, the first in its lower half."""
    return cvt_f32_to_e2m1(v0) | (cvt_f32_to_e2m1(v1) << Uint32(4))


@cute.jit
def cvt_e2m1x8_f32(
    v0: Float32,
    v1: Float32,
    v2: Float32,
    v3: Float32,
    v4: Float32,
    v5: Float32,
    v6: Float32,
    v7: Float32,
) -> Uint32:
    """The codes of eight values in a word, the first in its lowest four bits."""
    low = cvt_fp32x2_to_e2m1x2(v0, v1) | (cvt_fp32x2_to_e2m1x2(v2, v3) << Uint32(8))
    high = cvt_fp32x2_to_e2m1x2(v4, v5) | (cvt_fp32x2_to_e2m1x2(v6, v7) << Uint32(8))
    return low | (high << Uint32(16))


# ---- from 4 bits ----


@cute.jit
def fp4_decode_2(byte_val: Uint32) -> Uint32:
    """The two codes of the lowest byte as a packed pair of float16.

    The bits of a code, moved to where a float16 has its last two bits of the exponent and the first
    of the fraction, are its value times 2^-14; the code of 0.5 is a subnormal number there.
    """
    low = ((byte_val << Uint32(9)) & Uint32(0x0E00)) | ((byte_val << Uint32(12)) & Uint32(0x8000))
    high = ((byte_val << Uint32(21)) & Uint32(0x0E000000)) | (
        (byte_val << Uint32(24)) & Uint32(0x80000000)
    )
    return half2_mul(low | high, Uint32(0x74007400))


@cute.jit
def fp4_decode_4bytes(packed_u32: Uint32):
    """The eight codes of a word as four packed pairs of float16."""
    return tuple(fp4_decode_2(packed_u32 >> Uint32(8 * i)) for i in range(4))


@cute.jit
def quant_dequant_2(v0: Float32, v1: Float32, sf_f32: Float32, eff_scale: Float32):
    """Two values after 4 bits: the codes of their products with `eff_scale`, times `sf_f32`."""
    codes = cvt_fp32x2_to_e2m1x2(v0 * eff_scale, v1 * eff_scale)
    return half2_to_float2_scaled(fp4_decode_2(codes), sf_f32)


@cute.jit
def quant_dequant_e4m3_2(v0: Float32, v1: Float32, inv_scale: Float32, scale: Float32):
    """The same with e4m3: codes of the products with `inv_scale`, times `scale`."""
    zero = Float32(0.0)
    codes = cvt_f32x4_to_e4m3x4(v0 * inv_scale, v1 * inv_scale, zero, zero)
    values = cvt_e4m3x4_to_f32x4(codes)
    return values[0] * scale, values[1] * scale


# ---- products with float16 ----


@cute.jit
def _sum_of_pair(pair: Uint32) -> Float32:
    low, high = half2_to_float2_scaled(pair, Float32(1.0))
    return low + high


@cute.jit
def _fma2(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    code = """{
        .reg .b32 a, b, c;
        mov.b32 a, {$r0};
        mov.b32 b, {$r1};
        mov.b32 c, {$r2};
        fma.rn.f16x2 {$w0}, a, b, c;
    }"""
    return _ptx(code, [Uint32], a, b, c)


@cute.jit
def _dot4(u_packed: Uint32, xs, start: Uint32) -> Uint32:
    """A word's products with four packed pairs, added to `start` in float16, each half alone."""
    codes = fp4_decode_4bytes(u_packed)
    total = start
    for i in cutlass.range_constexpr(4):
        total = _fma2(codes[i], xs[i], total)
    return total


@cute.jit
def fp4_dot4_sum(u_packed: Uint32, x0: Uint32, x1: Uint32, x2: Uint32, x3: Uint32) -> Float32:
    """Dot product of the eight codes of a word and four packed pairs, summed in float16."""
    return _sum_of_pair(_dot4(u_packed, (x0, x1, x2, x3), Uint32(0)))


@cute.jit
def fp4_dot8_sum(
    u_a: Uint32,
    u_b: Uint32,
    x0: Uint32,
    x1: Uint32,
    x2: Uint32,
    x3: Uint32,
    x4: Uint32,
    x5: Uint32,
    x6: Uint32,
    x7: Uint32,
) -> Float32:
    """The same of two words and eight packed pairs, the first four of which belong to `u_a`."""
    first = _dot4(u_a, (x0, x1, x2, x3), Uint32(0))
    return _sum_of_pair(_dot4(u_b, (x4, x5, x6, x7), first))


@cute.jit
def fp4_dot4_sum_f32acc(
    u_packed: Uint32, x0: Uint32, x1: Uint32, x2: Uint32, x3: Uint32
) -> Float32:
    """`fp4_dot4_sum` with exact products, summed in float32."""
    codes, xs, total = fp4_decode_4bytes(u_packed), (x0, x1, x2, x3), Float32(0.0)
    for i in cutlass.range_constexpr(4):
        a, b = half2_to_float2_scaled(codes[i], Float32(1.0))
        c, d = half2_to_float2_scaled(xs[i], Float32(1.0))
        total = total + a * c + b * d
    return total


@cute.jit
def fp4_dot8_sum_f32acc(
    u_a: Uint32,
    u_b: Uint32,
    x0: Uint32,
    x1: Uint32,
    x2: Uint32,
    x3: Uint32,
    x4: Uint32,
    x5: Uint32,
    x6: Uint32,
    x7: Uint32,
) -> Float32:
    """`fp4_dot8_sum` with exact products, summed in float32."""
    return fp4_dot4_sum_f32acc(u_a, x0, x1, x2, x3) + fp4_dot4_sum_f32acc(u_b, x4, x5, x6, x7)


# ---- scales ----


@cute.jit
def nvfp4_scale_from_amax(block_amax: Float32, global_scale: Float32) -> Float32:
    """The scale that maps a block's largest magnitude to 6, times the global one; not yet e4m3."""
    return global_scale * (block_amax * rcp_approx_ftz(Float32(6.0)))


@cute.jit
def nvfp4_scale_from_amax_rn(block_amax: Float32, global_scale: Float32) -> Float32:
    """The same, each step rounded to nearest."""
    return fmul_rn(global_scale, fdiv_rn(block_amax, Float32(6.0)))


@cute.jit
def nvfp4_compute_output_scale(fp8_val: Uint32, global_scale: Float32) -> Float32:
    """The factor of values before they become codes: ``global_scale / scale``, 0 if that is 0."""
    scale, result = fp8_e4m3_to_f32(fp8_val), Float32(0.0)
    if scale != Float32(0.0):
        result = rcp_approx_ftz(scale * rcp_approx_ftz(global_scale))
    return result


@cute.jit
def nvfp4_compute_output_scale_rn(
    fp8_val: Uint32, global_scale: Float32, block_amax: Float32
) -> Float32:
    """The same, rounded to nearest; 0 also for a block of zeros."""
    scale, result = fp8_e4m3_to_f32(fp8_val), Float32(0.0)
    if scale != Float32(0.0) and block_amax != Float32(0.0):
        result = fdiv_rn(global_scale, scale)
    return result


@cute.jit
def cvt_s0e5m3_to_f16x2_broadcast(fp8_val: Uint32) -> Uint32:
    """A scale without a sign, 5 bits of exponent and 3 of fraction, as both halves of a pair."""
    half = (fp8_val & Uint32(0xFF)) << Uint32(7)
    return pack_halves(half, half)


@cute.jit
def pack_halves(low: Uint32, high: Uint32) -> Uint32:
    """Two numbers of 16 bits that lie in words."""
    return low | (high << Uint32(16))
