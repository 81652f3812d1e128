// Converts 4-bit floats (e2m1: a sign, two bits of exponent, one of mantissa) to pairs of 16 bits.
#pragma once

#include <cstdint>
#include <flashinfer/common/bits.cuh>
#include <flashinfer/common/dtype.cuh>
#include <type_traits>

namespace flashinfer {

// What e2m1_to_pairs() leaves out: the values are 2^-14 (float16) or 2^-126 (bfloat16) of the
// codes'.
template <typename T>
inline constexpr float kE2m1Unit = std::is_same_v<T, dtype::bfloat16> ? 0x1p126f : 0x1p14f;

// Puts sign, exponent and mantissa of eight codes to their places in T, so that a multiplication by
// a scale and kE2m1Unit gives their values; it also normalises the only subnormal. Pair p has codes
// p and p + 4 of the word, counted from the lowest bits.
template <typename T>
__device__ __forceinline__ void e2m1_to_pairs(uint32_t word, uint32_t (&pairs)[4]) {
  if constexpr (std::is_same_v<T, dtype::bfloat16>) {
    constexpr uint32_t kMagnitudes = 0x01c001c0u, kBoth = kMagnitudes | 0x80008000u;
    const uint32_t right = word >> 6;
    uint32_t signs = word & 0x80808080u;  // of pairs 1 and 3
    asm("" : "+r"(signs));                // else each use would mask for itself
    // One multiplication shifts a code to both places: bits 12 to 15 and 6 to 9 do not meet.
    pairs[0] = (word & 0x000f000fu) * 0x1040u & kBoth;
    pairs[2] = (right & 0x003c003cu) * 0x0410u & kBoth;
    // The other pair's signs are in the magnitudes' place, from where they are not taken.
    pairs[1] = select_bits(word << 2, signs << 8, kMagnitudes);
    pairs[3] = select_bits(right, signs, kMagnitudes);
  } else {
    // The upper byte of a float16 has room for all: bits 7 and 1 to 3. One selection brings four
    // codes there, and one mask per pair removes what else came along. The shifts to the left can
    // be multiplications, which leaves logic units 7 of 11 instructions.
    constexpr uint32_t kSigns = 0x80808080u, kCodes = 0x8e008e00u;
    const uint32_t even = select_bits(word << 4, word << 1, kSigns);
    const uint32_t odd = select_bits(word, word >> 3, kSigns);
    pairs[0] = (even << 8) & kCodes;
    pairs[1] = (odd << 8) & kCodes;
    pairs[2] = even & kCodes;
    pairs[3] = odd & kCodes;
  }
}

}  // namespace flashinfer
