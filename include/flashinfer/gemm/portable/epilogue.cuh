// Brings the sums of a CTA's warps to shared memory, from where they become D.
#pragma once

#include <flashinfer/gemm/portable/tile.cuh>
#include <flashinfer/gemm/weight_epilogue.cuh>

namespace flashinfer {

// All threads of the cluster call. The sums take the place of the weights in shared memory.
template <typename Tile>
__device__ __forceinline__ void finish_weight_gemm(const WeightGemmParams& params,
                                                   const WeightGemmWork& work, float* shared,
                                                   const float (&sums)[Tile::kTokenTiles][4]) {
  const uint32_t lane_idx = threadIdx.x % 32;
  const uint32_t column = threadIdx.x / 32 * 16 + lane_idx / 4;
#pragma unroll
  for (int j = 0; j < Tile::kTokenTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t token = j * 8 + lane_idx % 4 * 2 + i % 2;
      shared[token * Tile::kSumStride + column + i / 2 * 8] = sums[j][i];
    }
  }
  if constexpr (Tile::kSplits > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  WeightGemmEpilogue<Tile>(params, work, shared).store(threadIdx.x, Tile::kThreads);
  // Other CTAs of the cluster may still read this one's shared memory.
  if constexpr (Tile::kSplits > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace flashinfer
