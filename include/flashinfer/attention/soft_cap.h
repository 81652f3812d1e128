// Constants of a soft cap, unit * c * tanh(scale * s / c), made once for a launch, so that
// kernels read them as constants. math.cuh has the function. Plain C++.
#pragma once

#include <flashinfer/common/math.cuh>

namespace flashinfer {

struct SoftCapFactors {
  float factors[3];           // of a polynomial in odd powers of s, for s near 0
  float most_x, most_result;  // the |x| and the result up to which it serves; negative: never
  float k, most;              // x = k s is the argument of tanh; the limit for large s

  SoftCapFactors() = default;

  // k is kept finite; beyond that range logits are alike with and without a cap, or all 0.
  FLASHINFER_HOST_DEVICE SoftCapFactors(float cap, float scale, float unit) {
    k = scale / cap;
    k = k < 1e-37f ? 1e-37f : k < 1e37f ? k : 1e37f;
    const float square = k * k, largest = scale * unit * 1e37f;
    factors[0] = scale * unit;
    factors[1] = factors[0] * kCubic * square;
    factors[2] = factors[0] * kQuintic * square * square;
    most = cap * unit < largest ? cap * unit : largest;
    // Where the factors leave the range of numbers, the polynomial never serves.
    const bool are_normal = factors[2] > 1e-37f && factors[2] < 1e37f;
    most_x = are_normal ? kNear : -1.f;
    most_result = are_normal ? most * kNearResult : -1e38f;
  }

  static constexpr float kNear = 0.5f;  // up to this |x| tanh is a polynomial
  static constexpr float kCubic = -0.331851155f, kQuintic = 0.115442269f;
  static constexpr float kNearResult = kNear * (1.f + kCubic / 4.f + kQuintic / 16.f);
};

}  // namespace flashinfer
