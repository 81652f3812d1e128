// Reductions over a warp or an aligned power-of-two part of it. All lanes of the warp must call;
// every lane of a part gets its result. The order of additions is fixed: results repeat bit for
// bit.
#pragma once

namespace flashinfer {

__device__ __forceinline__ float warp_reduce_sum(float x, int width = 32) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

// NaN is passed over, unless all are.
__device__ __forceinline__ float warp_reduce_max(float x, int width = 32) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

}  // namespace flashinfer
