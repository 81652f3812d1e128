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

// unit * c * tanh(scale * s / c) without a division: near 0 a polynomial in the square of s,
// elsewhere (1 - e) / (1 + e) with e = exp(-2 |x|), where the quotient is a polynomial in e, so
// that one exponential is all that leaves the multipliers. The error is below 1.2e-5 unit c.
// tanh.approx has only 11 bits, which a cap of 30 turns into errors of several hundredths of a
// logit.
struct SoftCap {
  float factors[3], most_square;  // of the polynomial, and up to which square of s it serves
  float k, most;

  // k = scale / c is the factor of s in the argument of tanh. It is kept finite; beyond that range
  // logits are alike with and without a cap, or all 0.
  __device__ __forceinline__ SoftCap(float cap, float scale, float unit = 1.f) {
    k = fminf(fmaxf(scale / cap, 1e-37f), 1e37f);
    most = scale * unit / k;
    const float square = k * k;
    factors[0] = scale * unit;
    factors[1] = factors[0] * kCubic * square;
    factors[2] = factors[0] * kQuintic * square * square;
    // Where the factors leave the range of numbers, the exact form alone serves.
    const bool are_normal = factors[2] > 1e-37f && factors[2] < 1e37f;
    most_square = are_normal ? kNear * kNear / square : -1.f;
  }

  // Whether `near` serves logits up to this magnitude.
  __device__ __forceinline__ bool is_near(float magnitude) const {
    return magnitude * magnitude <= most_square;
  }
  __device__ __forceinline__ float near(float s) const { return near(s, s * s, 0.f); }
  // `less` is subtracted by the last multiplication.
  __device__ __forceinline__ float near(float s, float square, float less) const {
    return fmaf(s, fmaf(square, fmaf(square, factors[2], factors[1]), factors[0]), -less);
  }

  // Serves any logit, with the bits of `near` where that serves.
  __device__ __forceinline__ float operator()(float s) const { return exact(s, 0.f); }
  // The same, but a hidden logit of -inf stays so.
  __device__ __forceinline__ float exponent(float s, float less) const {
    return s == -inf ? s : exact(s, less);
  }

 private:
  __device__ __forceinline__ float exact(float s, float less) const {
    if (s * s <= most_square) return near(s, s * s, less);
    const float x = s * k, square = x * x, e = ptx_exp2(fabsf(x) * (-2.f * log2e));
    float far = fmaf(e, 0.916096747f, -1.72489285f);
    far = fmaf(e, far, 1.96990049f);
    far = fmaf(e, far, -1.99894249f);
    far = copysignf(fmaf(e, far, 1.f), x);
    const float close = x * fmaf(square, fmaf(square, kQuintic, kCubic), 1.f);
    return fmaf(most, fabsf(x) <= kNear ? close : far, -less);
  }

  static constexpr float kNear = 0.5f;  // up to this |x| tanh is a polynomial
  static constexpr float kCubic = -0.331851155f, kQuintic = 0.115442269f;
};

__device__ __forceinline__ float tanh(float x) { return SoftCap(1.f, 1.f)(x); }

}  // namespace flashinfer::math
