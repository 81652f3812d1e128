// Codes of the 4-bit format E2M1: one sign bit, and codes 0 to 7 for the magnitudes 0, 0.5, 1, 1.5,
// 2, 3, 4, 6.
#pragma once

#include <cstdint>
#include <flashinfer/common/bits.cuh>

namespace flashinfer {

namespace detail {

// 2^23: a float of this size has a step of one, so adding to it rounds to an integer, ties to even.
inline constexpr float kRoundToInteger = 8388608.f;

// Returns kRoundToInteger plus the code of twice `half`, which is not negative; beyond 6 the code
// is 7, and for NaN it is 0.
//
// The format's step is 0.5 below 2, 1 from there to 4, then 2. The three clamped terms cover these
// ranges in turn with a slope of one code per step, so that each addition rounds in its own range.
// An even code has an even mantissa, so ties to even are correct. Everything runs on the
// floating-point pipe and leaves free the integer pipe, which is half as wide and needed for
// packing.
__device__ __forceinline__ float e2m1_shifted_code(float half) {
  float code = fmaf(__saturatef(half), 4.f, kRoundToInteger);
  code = fmaf(__saturatef(half - 1.f), 2.f, code);
  return code + __saturatef(half - 2.f);
}

}  // namespace detail

// Codes of 2 * half[i], rounded to nearest even and saturated; element 0 is in the lowest four
// bits. N is 2, 4 or 8, and that many codes are in the lowest bits of the result. The magnitude of
// a NaN is 0, or 6 on devices with a conversion instruction.
template <int N>
__device__ __forceinline__ uint32_t pack_e2m1(const float (&half)[N]) {
  static_assert(N == 2 || N == 4 || N == 8, "whole bytes of one word");
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    uint32_t byte;
    asm("{\n.reg .b8 pair;\ncvt.rn.satfinite.e2m1x2.f32 pair, %1, %2;\ncvt.u32.u8 %0, pair;\n}"
        : "=r"(byte)
        : "f"(2.f * half[2 * i + 1]), "f"(2.f * half[2 * i]));
    word |= byte << (8 * i);
  }
  return word;
#else
  // Words of bytes: codes of two elements, and the signs of the even and of the odd elements.
  // Multiplications shift the codes, since they do not use the integer pipe. Their factors have a
  // second bit, because the compiler turns powers of two into shifts. It only reaches bits 24 and
  // up, where the bits of kRoundToInteger are.
  uint32_t codes[4] = {}, even[4] = {}, odd[4] = {};
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float low = detail::e2m1_shifted_code(fabsf(half[2 * i]));
    const float high = detail::e2m1_shifted_code(fabsf(half[2 * i + 1]));
    codes[i] = __float_as_uint(high) * 0x01000010u + __float_as_uint(low);
    even[i] = __float_as_uint(half[2 * i]);
    odd[i] = __float_as_uint(half[2 * i + 1]);
  }
  const auto gather = [](const uint32_t (&words)[4], uint32_t byte_of_each) {
    const uint32_t low = permute_bytes(words[0], words[1], byte_of_each);
    if (N <= 4) return low;
    const uint32_t high = permute_bytes(words[2], words[3], byte_of_each);
    return permute_bytes(low, high, 0x5410);
  };
  constexpr uint32_t kLowest = 0x0040, kSigns = 0x00fb;  // byte 0 of each; eight times bit 31
  const uint32_t signs = (gather(even, kSigns) & 0x08080808u) | (gather(odd, kSigns) & 0x80808080u);
  if constexpr (N == 8) {
    const uint32_t three = codes[0] + codes[1] * 0x01000100u + codes[2] * 0x01010000u;
    return permute_bytes(three, codes[3], 0x4210) | signs;
  }
  const uint32_t word = gather(codes, kLowest) | signs;
  return word & (N == 4 ? 0xffffu : 0xffu);
#endif
}

}  // namespace flashinfer
