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

// __byte_perm with PTX's fourth selector bit, which spreads a byte's sign over the byte.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

}  // namespace detail

// Codes of 2 * half[i], rounded to nearest even and saturated; element 0 in the lowest four bits.
// N is 2, 4 or 8, and that many codes are in the lowest bits of the result. The magnitude of a NaN
// is 0, or 6 where an instruction converts.
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
  // Words by bytes: codes of two elements, and the signs of the even and of the odd elements. Codes
  // are shifted by products, which the integer pipe has no part in; their factors have a second
  // bit, as the compiler makes shifts of powers of two. It only reaches bits 24 and up, where
  // kRoundToInteger's are.
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
    const uint32_t low = detail::permute_bytes(words[0], words[1], byte_of_each);
    if (N <= 4) return low;
    const uint32_t high = detail::permute_bytes(words[2], words[3], byte_of_each);
    return detail::permute_bytes(low, high, 0x5410);
  };
  constexpr uint32_t kLowest = 0x0040, kSigns = 0x00fb;  // byte 0 of each; eight times bit 31
  const uint32_t signs = (gather(even, kSigns) & 0x08080808u) | (gather(odd, kSigns) & 0x80808080u);
  if constexpr (N == 8) {
    const uint32_t three = codes[0] + codes[1] * 0x01000100u + codes[2] * 0x01010000u;
    return detail::permute_bytes(three, codes[3], 0x4210) | signs;
  }
  const uint32_t word = gather(codes, kLowest) | signs;
  return word & (N == 4 ? 0xffffu : 0xffu);
#endif
}

}  // namespace flashinfer
