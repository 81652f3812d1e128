// lop3.b32: any function of three words, bit by bit, in one instruction. Compilers take these
// expressions apart where masks are constants.
#pragma once

#include <cstdint>

namespace flashinfer {

// Bits of `x` where `mask` has ones, else of `y`.
__device__ __forceinline__ uint32_t select_bits(uint32_t x, uint32_t y, uint32_t mask) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(bits) : "r"(x), "r"(y), "r"(mask));
  return bits;
}

// x & mask ^ flips.
__device__ __forceinline__ uint32_t mask_and_flip(uint32_t x, uint32_t mask, uint32_t flips) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(bits) : "r"(x), "r"(mask), "r"(flips));
  return bits;
}

}  // namespace flashinfer
