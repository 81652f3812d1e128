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
  float k, factors[3];

  // k = scale / c is the factor of s in the argument of tanh. It is kept finite; beyond that range
  // logits are alike with and without a cap, or all 0.
  __device__ __forceinline__ SoftCap(float cap, float scale) {
    k = fminf(fmaxf(scale / cap, 1e-37f), 1e37f);
    factors[0] = scale / k;
    factors[1] = factors[0] * -0.331851155f;
    factors[2] = factors[0] * 0.115442269f;
  }

  // Whether `near` serves logits up to this magnitude.
  __device__ __forceinline__ bool is_near(float magnitude) const {
    return magnitude * k <= kTanhNear;
  }
  __device__ __forceinline__ float near(float s) const { return polynomial(s * k); }
  __device__ __forceinline__ float operator()(float s) const {
    const float x = s * k, e = ptx_exp2(fabsf(x) * (-2.f * log2e));
    float far = fmaf(e, 0.916096747f, -1.72489285f);
    far = fmaf(e, far, 1.96990049f);
    far = fmaf(e, far, -1.99894249f);
    far = fmaf(e, far, 1.f) * factors[0];
    return fabsf(x) <= kTanhNear ? polynomial(x) : copysignf(far, x);
  }

 private:
  __device__ __forceinline__ float polynomial(float x) const {
    const float square = x * x;
    return x * fmaf(square, fmaf(square, factors[2], factors[1]), factors[0]);
  }
};

__device__ __forceinline__ float tanh(float x) { return SoftCap(1.f, 1.f)(x); }

}  // namespace flashinfer::math
