// Scalar functions of the gates.
#pragma once

#include <flashinfer/common/exp2.cuh>

namespace flashinfer {

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// log(1 + exp(x)), which is x to the last bit of float beyond 20.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// The same without branches, which IEEE division and log1pf have: they run beside other work.
__device__ __forceinline__ float sigmoid_without_branch(float x) {
  return __fdividef(1.f, 1.f + expf(-x));
}

// max(x, 0) + log(1 + t). What the sum 1 + t loses of t is added to its logarithm.
__device__ __forceinline__ float softplus_without_branch(float x) {
  const float t = expf(-fabsf(x)), sum = 1.f + t;
  return fmaxf(x, 0.f) + (logf(sum) + __fdividef(t - (sum - 1.f), sum));
}

// exp, sigmoid and softplus for many numbers at once, with errors of a few units of the last place
// of what is exponentiated. log(1 + t) is 2 artanh(s) with s = t / (2 + t), which is at most 1/3,
// by its series, so small t lose nothing.
__device__ __forceinline__ float approximate_exp(float x) {
  return math::ptx_exp2(x * math::log2e);
}

__device__ __forceinline__ float approximate_sigmoid(float x) {
  return __fdividef(1.f, 1.f + approximate_exp(-x));
}

__device__ __forceinline__ float approximate_softplus(float x) {
  const float t = approximate_exp(-fabsf(x)), s = __fdividef(t, 2.f + t), s2 = s * s;
  float series = 2.f / 13.f;
  series = series * s2 + 2.f / 11.f;
  series = series * s2 + 2.f / 9.f;
  series = series * s2 + 2.f / 7.f;
  series = series * s2 + 2.f / 5.f;
  series = series * s2 + 2.f / 3.f;
  return fmaxf(x, 0.f) + s * (series * s2 + 2.f);
}

}  // namespace flashinfer
