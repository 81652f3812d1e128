// D = A W^T with 4-bit weights for few tokens on Hopper: the copy engine streams weights through a
// ring of stages in shared memory without a pause, also from one tile to the next, and warps unpack
// them in registers.
//
// One warp loads (weight_producer.cuh), eight or sixteen multiply (weight_consumer.cuh). CTAs take
// one tile each, if all fit on the GPU at once, or are persistent and take tile after tile
// (weight_tile.cuh). Sums of the warps, and of CTAs of a cluster that split k, are added up in a
// fixed order, so that results repeat bit for bit.
#pragma once

#include <flashinfer/gemm/sm90/weight_consumer.cuh>
#include <flashinfer/ptx/cp_async.cuh>

namespace flashinfer {

template <typename Tile>
__device__ __forceinline__ void init_weight_barriers(uint32_t shared) {
  const uint32_t barriers = shared + Tile::kOffsetBarriers;
  for (int i = 0; i < Tile::kStages; ++i) {
    ptx::mbarrier_init(barriers + i * 8, 1);
    ptx::mbarrier_init(barriers + (Tile::kStages + i) * 8, Tile::kTeamWarps);
  }
  if (Tile::kSplits > 1) ptx::mbarrier_init(shared + Tile::kOffsetSplitBarrier, 1);
  ptx::mbarrier_init_fence();
  if (Tile::kSplits > 1) {
    ptx::mbarrier_arrive_expect(shared + Tile::kOffsetSplitBarrier, WeightSplit<Tile>::bytes());
  }
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kLeastCtas)
    weight_stream_kernel(const __grid_constant__ WeightStreamParams params) {
  extern __shared__ __align__(1024) char memory[];
  const uint32_t shared = ptx::shared_address(memory), warp_idx = threadIdx.x / 32;
  auto* const table = reinterpret_cast<uint32_t*>(memory + Tile::kOffsetTable);
  if (threadIdx.x == 0) init_weight_barriers<Tile>(shared);
  if (Tile::kSplits > 1) {
    __syncwarp();
    ptx::cluster_arrive();
  }
  if (threadIdx.x == 32 * Tile::kWarps) {
    ptx::tma_prefetch_map(&params.codes);
    if (Tile::kHasBoxes) ptx::tma_prefetch_map(&params.scales);
    if (Tile::kOnce) ptx::tma_prefetch_map(&params.activations);
  }
  // CTAs of one tile wait for the preceding grid later, when they know their tile. With
  // `starts_early` the offsets were written before that grid began; it lets this one start only
  // after it has waited for them itself.
  if (!Tile::kOnce) {
    if (!params.gemm.starts_early) ptx::grid_dependency_wait();
    ptx::grid_launch_dependents();
    if (warp_idx == 0) WeightSchedule<Tile>::make_table(params.gemm, table);
  }
  __syncthreads();
  if (warp_idx == Tile::kWarps) {
    WeightProducer<Tile>(params, shared, table).run();
    if (Tile::kSplits > 1) {
      __syncwarp();
      ptx::cluster_wait();
    }
  } else {
    WeightConsumer<Tile>(params, shared, table,
                         reinterpret_cast<float*>(memory + Tile::kOffsetSums))
        .run();
  }
}

}  // namespace flashinfer
