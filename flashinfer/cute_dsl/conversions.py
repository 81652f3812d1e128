"""Conversions between float32 and smaller floating-point formats, and arithmetic on packed pairs.

A packed pair is a `Uint32` with the first element in its lower half. Functions with ``half2`` in
their name are of float16, with ``bfloat2`` of bfloat16.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint16, Uint32, cute


def _ptx(code: str, results, *operands):
    """One or several results of a few instructions."""
    return cute.arch.inline_ptx(code, write_only_types=results, read_only_args=list(operands))


# ---- 8-bit floats ----


@cute.jit
def cvt_f32_to_e4m3(a: Float32) -> Uint32:
    """The e4m3 code of a value in the lowest byte, to nearest; beyond 448 it is that of 448."""
    pair = _ptx(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};", [Uint16], Float32(0.0), Float32(a)
    )
    return Uint32(pair) & Uint32(0xFF)


@cute.jit
def cvt_f32x4_to_e4m3x4(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four codes, the first in the lowest byte."""
    low = _ptx("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};", [Uint16], b, a)
    high = _ptx("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};", [Uint16], d, c)
    return pack_16bit_to_u32(low, high)


@cute.jit
def cvt_f32x4_to_e5m2x4(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """The same in e5m2, whose largest finite value is 57344."""
    low = _ptx("cvt.rn.satfinite.e5m2x2.f32 {$w0}, {$r0}, {$r1};", [Uint16], b, a)
    high = _ptx("cvt.rn.satfinite.e5m2x2.f32 {$w0}, {$r0}, {$r1};", [Uint16], d, c)
    return pack_16bit_to_u32(low, high)


@cute.jit
def cvt_e4m3x2_to_f16x2_pair(packed_u32: Uint32):
    """The four e4m3 codes of a word as two packed pairs of float16, which holds them exactly."""
    # The word goes through a register of its own: a constant may not stand for 16 bits of it.
    code = """{
        .reg .b32 word;
        .reg .b16 lo, hi;
        mov.b32 word, {$r0};
        mov.b32 {lo, hi}, word;
        cvt.rn.f16x2.e4m3x2 {$w0}, lo;
        cvt.rn.f16x2.e4m3x2 {$w1}, hi;
    }"""
    return _ptx(code, [Uint32, Uint32], packed_u32)


@cute.jit
def f16x2_to_f32x2(packed_h2: Uint32):
    """Both float16 of a packed pair."""
    return half2_to_float2_scaled(packed_h2, Float32(1.0))


@cute.jit
def cvt_e4m3x4_to_f32x4(packed: Uint32):
    """The four e4m3 codes of a word as float32."""
    low, high = cvt_e4m3x2_to_f16x2_pair(packed)
    return (*f16x2_to_f32x2(low), *f16x2_to_f32x2(high))


@cute.jit
def fp8_e4m3_to_f32(fp8_val: Uint32) -> Float32:
    """The value of the e4m3 code in the lowest byte."""
    pair, _ = cvt_e4m3x2_to_f16x2_pair(fp8_val & Uint32(0xFF))
    return f16x2_to_f32x2(pair)[0]


cvt_e4m3_to_f32 = cvt_e4m3_to_f32_via_f16 = fp8_e4m3_to_f32


@cute.jit
def fp8_e4m3_to_f32_and_rcp(fp8_val: Uint32) -> Float32:
    """The reciprocal of an e4m3 code's value, and 0 for a code of zero."""
    value = fp8_e4m3_to_f32(fp8_val)
    result = Float32(0.0)
    if value != Float32(0.0):
        result = rcp_approx_ftz(value)
    return result


@cute.jit
def store_float8(values: cute.TensorSSA, target: cute.Tensor):
    """Round to a compact tensor of 8-bit floats in registers; its first mode is a multiple of four.

    The DSL's own conversion of a vector takes some fifteen instructions an element.
    """
    held = cute.make_rmem_tensor(values.shape, Float32)
    held.store(values)
    words = cute.recast_tensor(target, Uint32)
    convert = (
        cvt_f32x4_to_e4m3x4 if target.element_type is cutlass.Float8E4M3FN else cvt_f32x4_to_e5m2x4
    )
    for i in cutlass.range_constexpr(cute.size(values.shape) // 4):
        words[i] = convert(*(held[4 * i + k] for k in range(4)))


# ---- float16 and bfloat16 ----


@cute.jit
def float32_of(held: cute.Tensor) -> cute.TensorSSA:
    """The values of a compact tensor in registers, of an even number of elements.

    Two bfloat16 of a word take an instruction each, by the DSL's own conversion three.
    """
    if cutlass.const_expr(held.element_type is not cutlass.BFloat16):
        return held.load().to(Float32)
    words = cute.recast_tensor(held, Uint32)
    found = cute.make_rmem_tensor(held.shape, Uint32)
    for i in cutlass.range_constexpr(cute.size(words)):
        found[2 * i], found[2 * i + 1] = words[i] << Uint32(16), words[i] & Uint32(0xFFFF0000)
    return cute.recast_tensor(found, Float32).load()


@cute.jit
def pack_16bit_to_u32(lo, hi) -> Uint32:
    """Two values of 16 bits in a word, the first in its lower half."""
    return _ptx("mov.b32 {$w0}, {{$r0}, {$r1}};", [Uint32], lo, hi)


@cute.jit
def cvt_f32x2_to_half2(a: Float32, b: Float32) -> Uint32:
    """Two values as a packed pair, to nearest."""
    return _ptx("cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};", [Uint32], b, a)


@cute.jit
def cvt_f32x2_to_bfloat2(a: Float32, b: Float32) -> Uint32:
    """Two values as a packed pair, to nearest."""
    return _ptx("cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", [Uint32], b, a)


pack_f32x2_to_f16x2 = cvt_f32x2_to_half2


@cute.jit
def half2_to_float2_scaled(h2: Uint32, scale: Float32):
    """Both values of a packed pair, times a scale."""
    code = """{
        .reg .b16 lo, hi;
        mov.b32 {lo, hi}, {$r0};
        cvt.f32.f16 {$w0}, lo;
        cvt.f32.f16 {$w1}, hi;
    }"""
    low, high = _ptx(code, [Float32, Float32], h2)
    return low * scale, high * scale


@cute.jit
def bfloat2_to_float2_scaled(bf2: Uint32, scale: Float32):
    """Both values of a packed pair, times a scale: they are the upper halves of float32."""
    code = """{
        .reg .b32 lo, hi;
        shl.b32 lo, {$r0}, 16;
        and.b32 hi, {$r0}, 0xffff0000;
        mov.b32 {$w0}, lo;
        mov.b32 {$w1}, hi;
    }"""
    low, high = _ptx(code, [Float32, Float32], bf2)
    return low * scale, high * scale


def _packed(code: str):
    """A function of two packed pairs."""

    # Registers of their own: a constant may not stand for a pair.
    moves = "{ .reg .b32 a, b; mov.b32 a, {$r0}; mov.b32 b, {$r1};"

    @cute.jit
    def operation(a: Uint32, b: Uint32) -> Uint32:
        return _ptx(f"{moves} {code} {{$w0}}, a, b; }}", [Uint32], a, b)

    return operation


def _packed_unary(code: str):
    """A function of one packed pair."""

    @cute.jit
    def operation(x: Uint32) -> Uint32:
        return _ptx(f"{{ .reg .b32 x; mov.b32 x, {{$r0}}; {code} {{$w0}}, x; }}", [Uint32], x)

    return operation


half2_mul, hadd2, hmax2 = (_packed(f"{name}.f16x2") for name in ("mul", "add", "max"))
bfloat2_mul, bfloat2_add, bfloat2_hmax2 = (
    _packed(f"{name}.bf16x2") for name in ("mul.rn", "add.rn", "max")
)
habs2, bfloat2_habs2 = _packed_unary("abs.f16x2"), _packed_unary("abs.bf16x2")


@cute.jit
def hmax_to_f32(x: Uint32) -> Float32:
    """The larger value of a packed pair."""
    low, high = half2_to_float2_scaled(x, Float32(1.0))
    return fmax_f32(low, high)


@cute.jit
def bfloat2_hmax_to_f32(x: Uint32) -> Float32:
    """The larger value of a packed pair."""
    low, high = bfloat2_to_float2_scaled(x, Float32(1.0))
    return fmax_f32(low, high)


# ---- float32 ----


def _float32(code: str):
    """A function of two numbers."""

    @cute.jit
    def operation(a: Float32, b: Float32) -> Float32:
        return _ptx(f"{code} {{$w0}}, {{$r0}}, {{$r1}};", [Float32], a, b)

    return operation


def _float32_unary(code: str):
    """A function of one number."""

    @cute.jit
    def operation(a: Float32) -> Float32:
        return _ptx(f"{code} {{$w0}}, {{$r0}};", [Float32], a)

    return operation


fadd_rn, fsub_rn, fmul_rn, fdiv_rn, fmin_f32, fmax_f32 = (
    _float32(f"{name}.f32") for name in ("add.rn", "sub.rn", "mul.rn", "div.rn", "min", "max")
)
rcp_approx_ftz, rcp_rn, fabs_f32 = (
    _float32_unary(f"{name}.f32") for name in ("rcp.approx.ftz", "rcp.rn", "abs")
)


# ---- exponents alone: the scales of MXFP formats, 2 ** (code - 127) ----


@cute.jit
def cvt_f32_to_ue8m0(max_val: Float32) -> Uint32:
    """The code of the smallest power of two that is not below a number, and 0 for 0.

    The code of a subnormal number is that of 2^-126. The largest code is 254, as 255 is NaN.
    """
    code = """{
        .reg .b32 bits, exponent, rest;
        .reg .pred up;
        mov.b32 bits, {$r0};
        bfe.u32 exponent, bits, 23, 8;
        and.b32 rest, bits, 0x7fffff;
        setp.ne.u32 up, rest, 0;
        @up add.u32 exponent, exponent, 1;
        min.u32 {$w0}, exponent, 254;
    }"""
    return _ptx(code, [Uint32], max_val)


@cute.jit
def cvt_e8m0_to_f32(e8m0_val: Uint32) -> Float32:
    """The value of a code; 2^-127, which code 0 stands for, is a subnormal number."""
    code = """{
        .reg .b32 bits;
        .reg .pred least;
        shl.b32 bits, {$r0}, 23;
        setp.eq.u32 least, {$r0}, 0;
        @least mov.b32 bits, 0x00400000;
        mov.b32 {$w0}, bits;
    }"""
    return _ptx(code, [Float32], e8m0_val)


@cute.jit
def ue8m0_to_output_scale(ue8m0_val: Uint32) -> Float32:
    """The reciprocal of a code's value, by which is multiplied."""
    return rcp_rn(cvt_e8m0_to_f32(ue8m0_val))


@cute.jit
def pow2_ceil_ue8m0(scale: Float32):
    """The smallest power of two that is not below a number, and its code."""
    code = cvt_f32_to_ue8m0(scale)
    return cvt_e8m0_to_f32(code), code


@cute.jit
def cvt_e8m0x4_to_f32x4(packed: Uint32):
    """The values of the four codes of a word."""
    return tuple(cvt_e8m0_to_f32((packed >> Uint32(8 * i)) & Uint32(0xFF)) for i in range(4))
