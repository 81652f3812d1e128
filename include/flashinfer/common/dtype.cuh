// Storage types of the 16-bit and 8-bit floating-point formats, and their conversion to and from
// float.
//
// Kernels keep these types in memory and compute in float, so they need only bits and conversions.
// They do not use cuda_fp16.h, cuda_bf16.h and cuda_fp8.h, because parsing these headers costs more
// than compiling a small kernel (nvcc 13.0: 0.8 CPU seconds for an empty unit, 1.25 with them). The
// names are PyTorch's, so that a module's configuration uses the dtype's own name.
#pragma once

#include <cstdint>

namespace flashinfer::dtype {

using float32 = float;

// A byte of two 4-bit codes, or the exponent of a power of two (e8m0).
using uint8 = uint8_t;

struct alignas(2) float16 {
  uint16_t bits;
};

struct alignas(2) bfloat16 {
  uint16_t bits;
};

// 1-4-3 without infinities: NaN is 0x7f, the largest finite value is 448.
struct float8_e4m3fn {
  uint8_t bits;
};

// 1-5-2 with infinities: the largest finite value is 57344.
struct float8_e5m2 {
  uint8_t bits;
};

template <typename T>
inline constexpr bool kIsFloat8 = false;
template <>
inline constexpr bool kIsFloat8<float8_e4m3fn> = true;
template <>
inline constexpr bool kIsFloat8<float8_e5m2> = true;

}  // namespace flashinfer::dtype

namespace flashinfer {

namespace detail {

// Rounds to nearest even and saturates to the largest finite value; NaN stays NaN. This is the
// portable form of cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32, which needs sm_89.
template <int kMantissaBits, int kExponentBias, uint32_t kMaxFinite, uint32_t kNaN>
__device__ __forceinline__ uint8_t float_to_float8(float x) {
  const uint32_t bits = __float_as_uint(x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(kNaN);  // PTX gives the positive NaN
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  constexpr int kMinExponent = 1 - kExponentBias;
  uint32_t code;
  if (exponent >= kMinExponent) {
    // Normal result: rounds the 23-bit mantissa to kMantissaBits; a carry moves into the exponent
    // by itself.
    constexpr int kShift = 23 - kMantissaBits;
    const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1u) + ((magnitude >> kShift) & 1u);
    code = (rounded >> kShift) - (static_cast<uint32_t>(127 - kExponentBias) << kMantissaBits);
  } else {
    // Subnormal result: counts units of the smallest step; the product is exact and rint rounds to
    // even.
    constexpr int kScaleExponent = kMantissaBits - kMinExponent;
    code = static_cast<uint32_t>(
        rintf(__uint_as_float(magnitude) * __uint_as_float((127u + kScaleExponent) << 23)));
  }
  return static_cast<uint8_t>(sign | (code > kMaxFinite ? kMaxFinite : code));
}

template <int kMantissaBits, int kExponentBias>
__device__ __forceinline__ float float8_to_float(uint8_t code) {
  // Places the exponent and mantissa fields in a float and corrects the bias by one exact product,
  // which also normalises subnormals.
  const uint32_t magnitude = static_cast<uint32_t>(code & 0x7fu) << (23 - kMantissaBits);
  const float scale = __uint_as_float((127u + 127u - kExponentBias) << 23);
  return copysignf(__uint_as_float(magnitude) * scale, code & 0x80u ? -1.f : 1.f);
}

}  // namespace detail

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(dtype::bfloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

__device__ __forceinline__ float to_float(dtype::float16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}

__device__ __forceinline__ float to_float(dtype::float8_e4m3fn x) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair;  // float16 represents every value, too
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(x.bits)));
  return to_float(dtype::float16{static_cast<uint16_t>(pair)});
#else
  return (x.bits & 0x7fu) == 0x7fu ? __uint_as_float(0x7fc00000u)
                                   : detail::float8_to_float<3, 7>(x.bits);
#endif
}

__device__ __forceinline__ float to_float(dtype::float8_e5m2 x) {
  // E5M2 is the upper byte of a float16, infinities and NaN included.
  return to_float(dtype::float16{static_cast<uint16_t>(x.bits << 8)});
}

// Converts two floats to two values of T in memory order (`low` first), rounded to nearest even.
// 8-bit formats saturate.
template <typename T>
struct PackedPair;

template <>
struct PackedPair<dtype::bfloat16> {
  using Bits = uint32_t;
  __device__ __forceinline__ static Bits pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#else
    const auto round = [](float x) -> uint32_t {
      const uint32_t bits = __float_as_uint(x);
      if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
      return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    };
    return round(low) | (round(high) << 16);
#endif
  }
};

template <>
struct PackedPair<dtype::float16> {
  using Bits = uint32_t;
  __device__ __forceinline__ static Bits pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#else
    uint16_t low_bits, high_bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(low_bits) : "f"(low));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(high_bits) : "f"(high));
    return low_bits | (static_cast<uint32_t>(high_bits) << 16);
#endif
  }
};

template <>
struct PackedPair<dtype::float8_e4m3fn> {
  using Bits = uint16_t;
  __device__ __forceinline__ static Bits pack(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16_t bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return static_cast<uint16_t>(detail::float_to_float8<3, 7, 0x7e, 0x7f>(low) |
                                 detail::float_to_float8<3, 7, 0x7e, 0x7f>(high) << 8);
#endif
  }
};

template <>
struct PackedPair<dtype::float8_e5m2> {
  using Bits = uint16_t;
  __device__ __forceinline__ static Bits pack(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16_t bits;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
#else
    return static_cast<uint16_t>(detail::float_to_float8<2, 15, 0x7b, 0x7f>(low) |
                                 detail::float_to_float8<2, 15, 0x7b, 0x7f>(high) << 8);
#endif
  }
};

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    const auto pair = PackedPair<T>::pack(x, 0.f);
    return T{static_cast<decltype(T::bits)>(pair)};
  }
}

}  // namespace flashinfer
