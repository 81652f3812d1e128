// Scalar functions of the gates.
#pragma once

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

inline constexpr float kLog2e = 1.4426950408889634f;

}  // namespace flashinfer
