"""Arithmetic of block scales that the references of several operations share, and their checks."""

from __future__ import annotations

import math
from typing import Any

import torch


def least_exponent(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The least k >= -127 with ``amax <= largest * 2^k``, for finite amax."""
    mantissa, exponent = torch.frexp(amax)
    largest_mantissa, largest_exponent = math.frexp(largest)
    k = exponent - largest_exponent + (mantissa > largest_mantissa).int()
    return torch.where(amax == 0, -127, k.clamp(min=-127))


def divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, correctly rounded: PyTorch on CUDA multiplies by the reciprocal of a number."""
    return x / torch.full_like(x, divisor)


def power_of_two_codes(k: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """UE8M0: k + 127; 255 for NaN, 254 for infinity."""
    code = torch.where(amax.isinf(), 254, k + 127)
    return torch.where(amax.isnan(), 255, code).to(torch.uint8)


def to_8bit(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest even and saturate; NaN stays NaN, or is 0 where there is none."""
    if dtype == torch.int8:
        return values.nan_to_num(0.0, 127.0, -128.0).round().clamp(-128, 127).to(dtype)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Four-bit codes, rounded to nearest even and saturated; the magnitude of NaN is 0."""
    size = values.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    # Halfway between two magnitudes the even code wins.
    for tie, even_is_above in (
        (0.25, False),
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += (size >= tie) if even_is_above else (size > tie)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two four-bit codes a byte, the first one lower."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Values of E2M1 codes, two a byte, in float32."""
    packed = packed.view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    values = magnitudes[codes & 7]
    return torch.where(codes >= 8, -values, values)


def swizzle(scales: torch.Tensor, layout: int) -> torch.Tensor:
    """Row-major scales in another layout, in one dimension: 0 tiles of 128x4, 1 of 8x4, 2 rows."""
    rows, blocks = scales.shape
    if layout == 2:
        return scales.flatten()
    height = 128 if layout == 0 else 8
    padded = scales.new_zeros(-(-rows // height) * height, -(-blocks // 4) * 4)
    padded[:rows, :blocks] = scales
    if not padded.numel():
        return padded.flatten()
    if layout == 1:
        return padded.reshape(-1, 8, padded.shape[1] // 4, 4).permute(0, 2, 1, 3).flatten()
    return padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def unswizzle(scales: torch.Tensor, layout: int, rows: int, blocks: int) -> torch.Tensor:
    """The inverse of `swizzle`; bytes in, bytes out."""
    scales = scales.view(torch.uint8)
    if layout == 2:
        return scales.reshape(rows, blocks)
    width = -(-blocks // 4)
    if layout == 1:
        linear = scales.reshape(-1, width, 8, 4).permute(0, 2, 1, 3)
    else:
        linear = scales.reshape(-1, width, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return linear.reshape(-1, 4 * width)[:rows, :blocks]


def mx_codes(x: torch.Tensor, block: int, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of x divided by their scales, and the scales as UE8M0, ``[rows, blocks]``."""
    blocks = x.reshape(x.shape[:-1].numel(), x.shape[-1] // block, block)
    amax = blocks.abs().amax(-1)
    k = least_exponent(torch.where(amax.isfinite(), amax, 1.0), largest)
    codes = power_of_two_codes(k, amax)
    scale = torch.exp2(codes.double() - 127)
    scale[amax.isnan()] = math.nan
    return (blocks.double() / scale[..., None]).float(), codes


def same_bits(expected: Any, actual: Any) -> bool:
    """Whether every output agrees bit for bit; a NaN agrees with any other."""

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        a, b = a.to(b.device), b.contiguous()
        if a.dtype.is_floating_point:
            nan = a.isnan()
            if not torch.equal(nan, b.isnan()):
                return False
            a, b = a.float().masked_fill(nan, 0), b.float().masked_fill(nan, 0)
            return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())
        return torch.equal(a, b)

    expected = expected if isinstance(expected, tuple) else (expected,)
    actual = actual if isinstance(actual, tuple) else (actual,)
    return len(expected) == len(actual) and all(map(same, expected, actual))


def neighbouring_codes(expected: Any, actual: Any) -> bool:
    """Whether dequantised groups agree within two steps of the format of the codes.

    For values that an approximation precedes: rounded to 16 bits they may differ in their last
    place, which moves a scale by as much (a power of two to the next) and a code to its neighbour.
    """
    (q, s), (actual_q, actual_s) = expected, actual
    if q.shape != actual_q.shape or q.dtype != actual_q.dtype or s.shape != actual_s.shape:
        return False
    if not q.numel():
        return True
    q, s = q.to(actual_q.device), s.to(actual_s.device)
    ratio = (actual_s / s).masked_fill(s.isnan() & actual_s.isnan(), 1.0)
    ratio = ratio.masked_fill(s.isinf() & actual_s.isinf(), 1.0)
    if not bool((((ratio - 1).abs() <= 0.01) | (ratio == 2) | (ratio == 0.5)).all()):
        return False
    step, relative = 1.0, 0.0
    if q.dtype != torch.int8:
        info = torch.finfo(q.dtype)
        step, relative = info.smallest_normal * info.eps, info.eps
    groups = (*s.shape, -1)
    wanted = q.float().reshape(groups) * s[..., None]
    got = actual_q.float().reshape(groups) * actual_s[..., None]
    room = (2 * relative + 0.02) * wanted.abs() + 2 * step * torch.maximum(s, actual_s)[..., None]
    return bool(((got - wanted).abs() <= room).logical_or(~wanted.isfinite()).all())


def neighbouring_fp4(expected: Any, actual: Any) -> bool:
    """Whether few codes and scales differ, by one: as `neighbouring_codes` for 4-bit codes."""
    (q, s), (actual_q, actual_s) = expected, actual
    if q.shape != actual_q.shape or s.shape != actual_s.shape:
        return False
    q, s = q.to(actual_q.device), s.to(actual_s.device)
    if bool(((s.int() - actual_s.int()).abs() > 1).any()):
        return False
    step = (unpack_pairs(q) - unpack_pairs(actual_q)).abs()
    return bool((step <= 2).all()) and int((step > 0).sum()) <= 0.02 * step.numel() + 2
