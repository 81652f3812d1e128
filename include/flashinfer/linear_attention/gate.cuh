// Scalar functions of the gates.
#pragma once

namespace flashinfer {

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// log(1 + exp(x)), which is x to the last bit of float beyond 20.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

inline constexpr float kLog2e = 1.4426950408889634f;

}  // namespace flashinfer
