// Sum over a CTA of whole warps. All threads must call; every thread gets the result. `scratch`
// holds one float per warp. There is one barrier inside, so a second call must use another scratch
// array (or follow a barrier).
#pragma once

#include <flashinfer/collective/warp_reduce.cuh>

namespace flashinfer {

__device__ __forceinline__ float block_reduce_sum(float x, float* scratch, int num_warps) {
  x = warp_reduce_sum(x);
  if (num_warps == 1) return x;
  const int lane_idx = static_cast<int>(threadIdx.x) % 32;
  const int warp_idx = static_cast<int>(threadIdx.x) / 32;
  if (lane_idx == 0) scratch[warp_idx] = x;
  __syncthreads();
  // Each warp adds all partial sums itself: a broadcast would need a second barrier.
  return warp_reduce_sum(lane_idx < num_warps ? scratch[lane_idx] : 0.f);
}

}  // namespace flashinfer
