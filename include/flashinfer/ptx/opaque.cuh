// Keeps the compiler from knowing a number.
#pragma once

namespace flashinfer::ptx {

// The number itself. What a loop computes from it is computed in every round: otherwise the
// compiler keeps the results of the first round in registers that the loop needs for more.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flashinfer::ptx
