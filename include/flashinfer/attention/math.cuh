// Functions and constants under the names that attention variants use.
#pragma once

#include <cstdint>
#include <flashinfer/common/exp2.cuh>

namespace flashinfer::math {

inline constexpr float loge2 = 0.693147180559945309417f;
inline constexpr float nan = __builtin_nanf("");

__device__ __forceinline__ float ptx_rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Computes 1 - 2 / (1 + e^2x). tanh.approx has only 11 bits, which a soft cap of 30 turns into
// errors of several hundredths of a logit.
__device__ __forceinline__ float tanh(float x) {
  return 1.f - 2.f * ptx_rcp(1.f + ptx_exp2(2.f * log2e * x));
}

}  // namespace flashinfer::math
