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
inline constexpr float kTanhNear = 0.5f;

// c * tanh(scale * s / c) without a division: near 0 a polynomial, elsewhere (1 - e) / (1 + e) with
// e = exp(-2 |x|), where the quotient is a polynomial in e, so that one exponential is all that
// leaves the multipliers. The error is below 1.2e-5 c. tanh.approx has only 11 bits, which a cap of
// 30 turns into errors of several hundredths of a logit.
struct SoftCap {
  float c, k, near_limit, factors[3];

  // k = scale / c is kept within the range where the factors are normal numbers. Beyond it logits
  // are alike with and without a cap, or all 0.
  __device__ __forceinline__ SoftCap(float cap, float scale) {
    k = fminf(fmaxf(scale / cap, 1e-7f), 1e7f);
    c = scale / k;
    near_limit = kTanhNear / k;
    factors[0] = scale;
    factors[1] = scale * (k * k) * -0.331851155f;
    factors[2] = scale * (k * k) * (k * k) * 0.115442269f;
  }

  // For |s| <= near_limit.
  __device__ __forceinline__ float near(float s) const {
    const float square = s * s;
    return s * fmaf(square, fmaf(square, factors[2], factors[1]), factors[0]);
  }
  __device__ __forceinline__ float operator()(float s) const {
    const float e = ptx_exp2(fabsf(s) * (k * (-2.f * log2e)));
    float far = fmaf(e, 0.916096747f, -1.72489285f);
    far = fmaf(e, far, 1.96990049f);
    far = fmaf(e, far, -1.99894249f);
    far = fmaf(e, far, 1.f) * c;
    return fabsf(s) <= near_limit ? near(s) : copysignf(far, s);
  }
};

__device__ __forceinline__ float tanh(float x) { return SoftCap(1.f, 1.f)(x); }

}  // namespace flashinfer::math
