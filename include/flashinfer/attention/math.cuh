// Functions and constants under the names that attention variants use.
#pragma once

#include <cstdint>
#include <flashinfer/attention/soft_cap.h>
#include <flashinfer/common/exp2.cuh>

namespace flashinfer::math {

inline constexpr float loge2 = 0.693147180559945309417f;
inline constexpr float nan = __builtin_nanf("");

// unit * c * tanh(scale * s / c) without a division: near 0 a polynomial in the square of s,
// elsewhere (1 - e) / (1 + e) with e = exp(-2 |x|), where the quotient is a polynomial in e, so
// that one exponential is all that leaves the multipliers. The error is below 1.2e-5 unit c.
// tanh.approx has only 11 bits, which a cap of 30 turns into errors of several hundredths of a
// logit.
struct SoftCap : SoftCapFactors {
  __device__ __forceinline__ explicit SoftCap(const SoftCapFactors& factors)
      : SoftCapFactors(factors) {}
  __device__ __forceinline__ SoftCap(float cap, float scale, float unit = 1.f)
      : SoftCapFactors(cap, scale, unit) {}

  // Whether `near` serves logits up to this magnitude.
  __device__ __forceinline__ bool is_near(float magnitude) const { return magnitude * k <= most_x; }
  // The polynomial; it increases with s, and is -inf for -inf. `less` is subtracted by the last
  // multiplication. A caller may hold the square back until it knows `zero`.
  __device__ __forceinline__ float near(float s, float less = 0.f, float zero = 0.f) const {
    const float square = fmaf(s, s, zero);
    return fmaf(s, fmaf(square, fmaf(square, factors[2], factors[1]), factors[0]), -less);
  }
  // Serves any logit. Both cases are computed, since lanes would take both branches.
  __device__ __forceinline__ float exact(float s, float less = 0.f) const {
    const float x = s * k, square = x * x, e = ptx_exp2(fabsf(x) * (-2.f * log2e));
    float far = fmaf(e, 0.916096747f, -1.72489285f);
    far = fmaf(e, far, 1.96990049f);
    far = fmaf(e, far, -1.99894249f);
    far = copysignf(fmaf(e, far, 1.f), x);
    const float close = x * fmaf(square, fmaf(square, kQuintic, kCubic), 1.f);
    return fmaf(most, fabsf(x) <= kNear ? close : far, -less);
  }
  // Serves any logit, with the bits of `near` where that serves.
  __device__ __forceinline__ float operator()(float s) const {
    if (is_near(fabsf(s))) return near(s);
    return exact(s);
  }
};

__device__ __forceinline__ float tanh(float x) { return SoftCap(1.f, 1.f).exact(x); }

}  // namespace flashinfer::math
