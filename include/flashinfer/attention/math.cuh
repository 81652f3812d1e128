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

// Up to this magnitude tanh is a polynomial.
inline constexpr float kTanhNear = 0.75f;

// tanh(x) for |x| <= kTanhNear, with an error below 5e-6.
__device__ __forceinline__ float tanh_near(float x) {
  const float square = x * x;
  float factor = fmaf(square, -0.0338787064f, 0.125877112f);
  factor = fmaf(square, factor, -0.332261115f);
  factor = fmaf(square, factor, 0.999958515f);
  return x * factor;
}

// tanh(x) = (1 - e) / (1 + e), e = exp(-2 |x|), with an error below 5e-6. For larger x the quotient
// is a polynomial in e, so that one exponential is all that leaves the multipliers. tanh.approx has
// only 11 bits, which a soft cap of 30 turns into errors of several hundredths of a logit.
__device__ __forceinline__ float tanh(float x) {
  const float e = ptx_exp2(fabsf(x) * (-2.f * log2e));
  float far = fmaf(e, 1.21554077f, -1.86993814f);
  far = fmaf(e, far, 1.99101555f);
  far = fmaf(e, far, -1.9998033f);
  far = fmaf(e, far, 1.f);
  return fabsf(x) <= kTanhNear ? tanh_near(x) : copysignf(far, x);
}

}  // namespace flashinfer::math
