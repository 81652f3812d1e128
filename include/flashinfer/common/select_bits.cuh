// lop3 with a fixed function, which the compiler does not take apart again.
#pragma once

#include <cstdint>

namespace flashinfer {

// Bits of `a` where `mask` is set, of `b` elsewhere.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t select_bits(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(result) : "r"(a), "r"(b), "n"(kMask));
  return result;
}

}  // namespace flashinfer
