// Instructions on bits and bytes of words. lop3.b32 is any function of three words, bit by bit;
// compilers take these expressions apart where masks are constants.
#pragma once

#include <cstdint>

namespace flashinfer {

// Bits of `x` where `mask` has ones, else of `y`.
__device__ __forceinline__ uint32_t select_bits(uint32_t x, uint32_t y, uint32_t mask) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(bits) : "r"(x), "r"(y), "r"(mask));
  return bits;
}

// (x ^ flips) & mask.
__device__ __forceinline__ uint32_t flip_and_mask(uint32_t x, uint32_t flips, uint32_t mask) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(bits) : "r"(x), "r"(flips), "r"(mask));
  return bits;
}

// Four of the eight bytes of `a` (0 to 3) and `b` (4 to 7), named by the selector's digits, whose
// fourth bits ask for eight copies of the byte's sign, unlike those of __byte_perm.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

}  // namespace flashinfer
