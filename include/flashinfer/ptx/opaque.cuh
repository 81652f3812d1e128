// Keeps the compiler from knowing a number.
#pragma once

#include <cstdint>

namespace flashinfer::ptx {

// The number itself. What a loop computes from it is computed in every round: otherwise the
// compiler keeps the results of the first round in registers that the loop needs for more.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// A constant that stays in its register: the compiler would move it there before each use, and
// sees through opaque(). `never` is false, which the compiler must not know.
__device__ __forceinline__ uint32_t resident(uint32_t constant, bool never) {
  uint32_t x = never ? 0u : constant;
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flashinfer::ptx
