// Codes of the 4-bit format E2M1: one sign bit and the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 for 0
// to 7.
#pragma once

#include <cstdint>

namespace flashinfer {

namespace detail {

// 2^23: a float this large has a step of one, so adding to it rounds to an integer, ties to even.
inline constexpr float kRoundToInteger = 8388608.f;

// kRoundToInteger plus the code of twice `half`, which is not negative; beyond 6 it is 7, and NaN
// is 0.
//
// Below 2 the format's step is 0.5, from there to 4 it is 1, then 2. The three clamped terms run
// through these ranges one after the other with a slope of one code per step, so that each addition
// rounds in its own range. An even code has an even mantissa, so ties to even come out right. All
// of it runs on the floating-point pipe, which leaves the integer pipe, half as wide and needed for
// packing, alone.
__device__ __forceinline__ float e2m1_shifted_code(float half) {
  float code = fmaf(__saturatef(half), 4.f, kRoundToInteger);
  code = fmaf(__saturatef(half - 1.f), 2.f, code);
  return code + __saturatef(half - 2.f);
}

}  // namespace detail

// Codes of 2 * |half[i]| with the sign of half[i], rounded to nearest even and saturated; element 0
// in the lowest four bits. N is 2, 4 or 8, and that many codes are in the lowest bits of the
// result. The magnitude of a NaN is 0, or 6 where the architecture converts.
template <int N>
__device__ __forceinline__ uint32_t pack_e2m1(const float (&half)[N]) {
  static_assert(N == 2 || N == 4 || N == 8, "whole bytes of one word");
  uint32_t bytes[N / 2];
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    asm("{\n.reg .b8 pair;\ncvt.rn.satfinite.e2m1x2.f32 pair, %1, %2;\ncvt.u32.u8 %0, pair;\n}"
        : "=r"(bytes[i])
        : "f"(2.f * half[2 * i + 1]), "f"(2.f * half[2 * i]));
  }
#else
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float low = detail::e2m1_shifted_code(fabsf(half[2 * i]));
    const float high = detail::e2m1_shifted_code(fabsf(half[2 * i + 1]));
    // The low byte is code + 16 * code of the other element.
    const float both = fmaf(high - detail::kRoundToInteger, 16.f, low);
    const uint32_t signs = ((__float_as_uint(half[2 * i]) >> 28) & 0x8u) |
                           ((__float_as_uint(half[2 * i + 1]) >> 24) & 0x80u);
    bytes[i] = __float_as_uint(both) | signs;
  }
#endif
  if constexpr (N == 2) {
    return bytes[0] & 0xffu;
  } else if constexpr (N == 4) {
    return __byte_perm(bytes[0], bytes[1], 0x0040) & 0xffffu;
  } else {
    const uint32_t low = __byte_perm(bytes[0], bytes[1], 0x0040);
    const uint32_t high = __byte_perm(bytes[2], bytes[3], 0x0040);
    return __byte_perm(low, high, 0x5410);
  }
}

}  // namespace flashinfer
