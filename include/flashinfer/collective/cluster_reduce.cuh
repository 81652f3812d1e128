// Sum over the CTAs of a cluster, each of whole warps (sm_90). All threads of the cluster must
// call; every thread gets the result. `scratch` holds one float for each warp of the cluster and
// serves one call: a second call needs another.
//
// A CTA's shared memory may be written only once the CTA has started. Call ptx::cluster_arrive at
// the beginning of the kernel and ptx::cluster_wait, which by then waits for nothing, before the
// first reduction.
#pragma once

#include <cstdint>
#include <flashinfer/collective/warp_reduce.cuh>
#include <flashinfer/ptx/cluster.cuh>

namespace flashinfer {

__device__ __forceinline__ float cluster_reduce_sum(float x, float* scratch, uint32_t num_warps) {
  const uint32_t cluster_size = ptx::cluster_size();
  const uint32_t lane_idx = threadIdx.x % 32;
  const uint32_t warp_idx = threadIdx.x / 32;
  x = warp_reduce_sum(x);
  // Each warp sends its sum to every CTA: this takes one cluster barrier instead of a CTA barrier
  // and a cluster barrier.
  if (lane_idx < cluster_size) {
    const float* slot = scratch + ptx::cluster_rank() * num_warps + warp_idx;
    ptx::cluster_store(ptx::cluster_address(slot, lane_idx), x);
  }
  ptx::cluster_arrive();
  ptx::cluster_wait();
  float sum = 0.f;
  for (uint32_t i = lane_idx; i < cluster_size * num_warps; i += 32) sum += scratch[i];
  return warp_reduce_sum(sum);
}

}  // namespace flashinfer
