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
    // The upper byte of a float16 has room for all: bits 7 and 1 to 3. Four bytes are made at once.
    constexpr uint32_t kSigns = 0x80808080u, kMagnitudes = 0x0e0e0e0eu;
    const uint32_t even = ((word << 4) & kSigns) | ((word << 1) & kMagnitudes);
    const uint32_t odd = (word & kSigns) | ((word >> 3) & kMagnitudes);
    pairs[0] = __byte_perm(even, 0, 0x2404);
    pairs[1] = __byte_perm(odd, 0, 0x2404);
    pairs[2] = even & 0xff00ff00u;
    pairs[3] = odd & 0xff00ff00u;
  }
}

}  // namespace flashinfer
