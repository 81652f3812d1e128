// Weights of elements as 64-bit fixed-point numbers. Their sums are exact in any order and for any
// split of a row, so a result depends on nothing but the row.
//
// The largest weight of a row is 2^43 to 2^44. (It is less for a denormal maximum, but then all
// bits are kept.) So 2^18 elements sum to less than 2^63, and an element down to 2^-21 of the
// largest keeps all bits of its float. Smaller ones are rounded to the nearest step.
#pragma once

#include <cstdint>
#include <flashinfer/common/exp2.cuh>

namespace flashinfer {

// Weight exp((logit - max) / temperature). The difference is taken first: it is practically exact
// where it matters, however large the logits or small the temperature. Rounding a product with a
// large maximum first would leave nothing of the difference. A maximum of +inf and a temperature of
// 0 give their limits: the maxima share the whole weight.
class LogitWeight {
 public:
  // The factor is neither 0 nor infinite, so that no product is NaN.
  __device__ __forceinline__ LogitWeight(float max, float inv_temperature)
      : max_(max), factor_(fminf(fmaxf(inv_temperature * 1.44269504f, 0x1p-126f), 0x1p127f)) {}

  // The difference of two infinities is NaN, for which fminf returns 0.
  __device__ __forceinline__ float to_float(float x) const {
    return math::ptx_exp2(fminf(x - max_, 0.f) * factor_);
  }

  __device__ __forceinline__ uint64_t operator()(float x) const { return to_fixed(to_float(x)); }

  __device__ __forceinline__ uint64_t to_fixed(float weight) const {
    return __float2ull_rn(weight * 0x1p43f);
  }

  // The weight of another maximum as a share of this one's weight.
  __device__ __forceinline__ float relative(float max) const { return to_float(max); }

  // Scale of to_float() in units of the fixed-point weight.
  __device__ __forceinline__ float scale() const { return 0x1p43f; }

  // Returns an x whose weight is at most `weight`, and not much less.
  __device__ __forceinline__ float at_most(float weight) const {
    const float below = max_ + __fdividef(__log2f(weight * 0x1p-43f) - 0.01f, factor_);
    return below <= max_ ? below : __uint_as_float(0xff800000u);
  }

 private:
  float max_, factor_;
};

// Weight of a probability, which need not be normalised. It is scaled by the power of two that
// belongs to the maximum.
class ProbWeight {
 public:
  __device__ __forceinline__ ProbWeight(float max, float) {
    const uint32_t exponent = __float_as_uint(max) >> 23 & 0xffu;
    const uint32_t shift = 43u + 127u - (exponent ? exponent : 1u);  // -84 to 169
    const int total = static_cast<int>(shift);
    const int half = total / 2;
    first_ = __uint_as_float(static_cast<uint32_t>(127 + half) << 23);
    second_ = __uint_as_float(static_cast<uint32_t>(127 + total - half) << 23);
  }

  // Applies two factors, since a single one would not be a float for a tiny maximum.
  __device__ __forceinline__ float to_float(float x) const {
    return fmaxf(x, 0.f) * first_ * second_;
  }

  __device__ __forceinline__ uint64_t operator()(float x) const { return to_fixed(to_float(x)); }

  __device__ __forceinline__ uint64_t to_fixed(float weight) const {
    return __float2ull_rn(weight);
  }

  // Unit of the weights that belong to another maximum, relative to this one's unit.
  __device__ __forceinline__ float relative(float max) const {
    const ProbWeight other(max, 1.f);
    return __fdividef(first_, other.first_) * __fdividef(second_, other.second_);
  }

  __device__ __forceinline__ float scale() const { return 1.f; }

  __device__ __forceinline__ float at_most(float weight) const {
    return __fdividef(__fdividef(weight * 0.99f, second_), first_);
  }

 private:
  float first_, second_;
};

}  // namespace flashinfer
