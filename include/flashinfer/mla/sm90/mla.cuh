// MLA for Hopper (sm_90a). CTAs are persistent, one per SM; each walks its share of the plan's
// items. One warpgroup loads (producer.cuh; from 8 bits two: widener.cuh, scaled_widener.cuh), two
// multiply (consumer.cuh). Sums run in a fixed order: results repeat bit for bit.
//
// Measurements, also of what lost: docs/tuning/mla.md.
#pragma once

#include <flashinfer/mla/own_plan.cuh>
#include <flashinfer/mla/sm90/consumer.cuh>
#include <flashinfer/mla/sm90/producer.cuh>
#include <flashinfer/mla/sm90/scaled_widener.cuh>
#include <flashinfer/mla/sm90/widener.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/setmaxnreg.cuh>

namespace flashinfer {

// One warp does it. `load_warps` bring chunks; with none the copy engine does.
template <typename Tile, int kSharers>
__device__ __forceinline__ void init_mla_barriers(MlaControl& control, int load_warps) {
  constexpr int kWarps = 4;  // of a warpgroup
  constexpr int kFull = 2 * kMlaMaxChunks, kEmpty = 2 * kNumParts;
  static_assert(kFull + kEmpty <= 32);
  const auto init = [](uint64_t& barrier, int arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    init(control.q_full, load_warps != 0 ? load_warps : kWarps - 1);
    init(control.q_empty, 2 * kWarps);
  }
  if (lane < kFull) {
    const bool shared_by_half = lane % kMlaMaxChunks < Tile::kChunksCkv;
    const int arrivals = shared_by_half ? load_warps / Tile::kChunksTogether : load_warps;
    init((&control.kv_full[0][0])[lane], load_warps != 0 ? arrivals : 1);
  } else if (lane < kFull + kEmpty) {
    init((&control.kv_empty[0][0])[lane - kFull], kWarps * kSharers);
  }
  ptx::mbarrier_init_fence();
}

// `kSharers`: CTAs of a cluster, which have the same KV rows.
template <typename Tile, int kSharers>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    mla_sm90_kernel(const __grid_constant__ MlaSm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  MlaControl& control = *reinterpret_cast<MlaControl*>(shared + Tile::kOffsetControl);
  const int warp_idx = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp_idx == 0) {
    init_mla_barriers<Tile, kSharers>(control, params.box_rows == 0 ? Tile::kLoadWarps : 0);
  } else if (warp_idx == kMlaCopyWarp && params.box_rows != 0) {
    ptx::tma_prefetch_map(&params.ckv);
    if (Tile::kDimKpe != 0) ptx::tma_prefetch_map(&params.kpe);
    if constexpr (Tile::template kQueriesAreBoxes<kSharers>) {
      ptx::tma_prefetch_map(&params.q_nope);
      if (Tile::kDimKpe != 0) ptx::tma_prefetch_map(&params.q_pe);
    }
  }
  __syncwarp();
  // Everybody waits for it before the first barrier: meanwhile the plan and page numbers come.
  ptx::cluster_arrive_relaxed();
  if (!params.mla.plan_is_older) ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();  // a grid finds no room before this CTA has ended
  // In the place of queries, which threads write.
  if (params.mla.plans_itself) plan_own_share(params.mla.planner, shared);
  // The other CTA of the cluster may still arrive at barriers of this one. Where it may also still
  // get rows from here, both wait before merges take their place.
  const auto end_with_other = [] {
    if (kSharers == 1) return;
    __syncwarp();
    if (Tile::kWidens) {
      ptx::cluster_arrive();
    } else {
      ptx::cluster_arrive_relaxed();
    }
    ptx::cluster_wait();
  };
  const MlaPartMerge<Tile> merge(params.mla, control, ptx::shared_address(shared));
  if (warp_idx >= kMlaCopyWarp) {
    ptx::decrease_registers<Tile::kProducerRegisters>();
    if constexpr (Tile::kScaled) {
      MlaScaledWidener<Tile, kSharers>(params.mla, shared, control).run();
    } else if constexpr (Tile::kWidens) {
      MlaWidener<Tile>(params.mla, shared, control).run();
    } else {
      MlaProducer<Tile, kSharers>(params, shared, control).run();
    }
    if (Tile::kWidens) end_with_other();
    if (warp_idx == Tile::kThreads / 32 - 1) merge.count_seen();
  } else {
    ptx::increase_registers<Tile::kConsumerRegisters>();
    int last_merge;
    if (warp_idx / 4 == 0) {
      last_merge = MlaConsumer<Tile, 0, kSharers>(params.mla, shared, control).run();
    } else {
      last_merge = MlaConsumer<Tile, 1, kSharers>(params.mla, shared, control).run();
    }
    if (Tile::kWidens) end_with_other();
    merge.end_last_item(last_merge);
  }
  if (!Tile::kWidens) end_with_other();
#endif
}

}  // namespace flashinfer
