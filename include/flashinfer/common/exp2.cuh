// Fast exponential and logarithm to base 2, and reciprocal, under the names that attention variants
// use.
#pragma once

namespace flashinfer::math {

inline constexpr float log2e = 1.44269504088896340736f;
inline constexpr float inf = __builtin_huge_valf();

// 2^x by ex2.approx, accurate to 2 units in the last place; 2^-inf is 0.
__device__ __forceinline__ float ptx_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float ptx_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float ptx_rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashinfer::math
