// Weights of elements as 64-bit fixed-point numbers: exact sums, in any order and however a row is split, so that a
// result depends on nothing but the row.
//
// The largest weight of a row is 2^43 to 2^44, so 2^18 elements sum to less than 2^63 and an element down to 2^-21 of the
// largest keeps all bits of its float; smaller ones are rounded to the nearest step.
#pragma once

#include <cstdint>

namespace flashinfer {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Weight 2^x for x = (logit - max) / temperature * log2(e). A maximum of +inf, and temperature 0, give their limits: the
// maxima share everything.
class LogitWeight {
 public:
  __device__ __forceinline__ LogitWeight(float max, float inv_temperature)
      : max_(max), factor_(inv_temperature * 1.44269504f) {}

  __device__ __forceinline__ float to_float(float x) const {
    // inf - inf and 0 * inf are NaN, which fminf turns into 0.
    return exp2_approx(fminf((x - max_) * factor_, 0.f));
  }

  __device__ __forceinline__ uint64_t operator()(float x) const {
    return __float2ull_rn(to_float(x) * 0x1p44f);
  }

  // What to_float gives, in terms of the fixed-point weight.
  __device__ __forceinline__ float scale() const { return 0x1p44f; }

  // An x whose weight is at most `weight`, and not much less.
  __device__ __forceinline__ float at_most(float weight) const {
    const float below = max_ + (log2f(weight * 0x1p-44f) - 0.01f) / factor_;
    return below <= max_ ? below : __uint_as_float(0xff800000u);
  }

 private:
  float max_, factor_;
};

// Weight of a probability, which need not be normalised: scaled by the power of two that belongs to the maximum.
class ProbWeight {
 public:
  __device__ __forceinline__ ProbWeight(float max, float) {
    const uint32_t exponent = __float_as_uint(max) >> 23 & 0xffu;
    const uint32_t shift = 43u + 127u - (exponent ? exponent : 1u);  // -84 to 169, biased by none
    const int total = static_cast<int>(shift);
    const int half = total / 2;
    first_ = __uint_as_float(static_cast<uint32_t>(127 + half) << 23);
    second_ = __uint_as_float(static_cast<uint32_t>(127 + total - half) << 23);
  }

  // In two factors, as one would not be a float for a tiny maximum.
  __device__ __forceinline__ float to_float(float x) const { return fmaxf(x, 0.f) * first_ * second_; }

  __device__ __forceinline__ uint64_t operator()(float x) const {
    return __float2ull_rn(to_float(x));
  }

  __device__ __forceinline__ float scale() const { return 1.f; }

  __device__ __forceinline__ float at_most(float weight) const {
    return weight * 0.99f / second_ / first_;
  }

 private:
  float first_, second_;
};

}  // namespace flashinfer
