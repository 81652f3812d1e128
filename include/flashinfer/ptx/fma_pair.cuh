// fma.rn and mul.rn of two 16-bit elements at once (sm_80).
#pragma once

#include <cstdint>
#include <flashinfer/common/dtype.cuh>
#include <type_traits>

namespace flashinfer::ptx {

// Two elements of T times a factor each, plus an addend each.
template <typename T>
__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t factor, uint32_t addend) {
  uint32_t result;
  if constexpr (std::is_same_v<T, dtype::bfloat16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(factor), "r"(addend));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(factor), "r"(addend));
  }
  return result;
}

// Two float16 times the lower (`kIndex` 0) or the upper (1) of two factors. Unpacked in PTX, the
// factor needs no instruction: a multiplication can name a half.
template <int kIndex>
__device__ __forceinline__ uint32_t scale_pair(uint32_t a, uint32_t factors) {
  uint32_t result;
  if constexpr (kIndex == 0) {
    asm("{\n"
        ".reg .b16 lower, upper;\n"
        ".reg .b32 both;\n"
        "mov.b32 {lower, upper}, %2;\n"
        "mov.b32 both, {lower, lower};\n"
        "mul.rn.f16x2 %0, %1, both;\n"
        "}"
        : "=r"(result)
        : "r"(a), "r"(factors));
  } else {
    asm("{\n"
        ".reg .b16 lower, upper;\n"
        ".reg .b32 both;\n"
        "mov.b32 {lower, upper}, %2;\n"
        "mov.b32 both, {upper, upper};\n"
        "mul.rn.f16x2 %0, %1, both;\n"
        "}"
        : "=r"(result)
        : "r"(a), "r"(factors));
  }
  return result;
}

// Two float16 times a factor each.
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t factors) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(factors));
  return result;
}

}  // namespace flashinfer::ptx
