// MLA for Hopper for requests of few query rows, 16 at a time. From caches of 16 bits: three
// quarters of the other kernel's tile would be empty, and queries take room there that KV needs.
// From caches of 8 bits: so would most of the tensor cores' 64 rows be, and what the other kernel
// does for each token, widening it in shared memory and reading it from there, takes longer than
// its bytes take to come.
//
// CTAs are persistent, one per SM; each walks its share of the plan's items. One warp loads
// (ring_loader.cuh), eight multiply: with mma.sync what has 16 bits (few/attention.cuh), or keys of
// 8 bits as they are and values widened (narrow/attention.cuh). Sums run in a fixed order: results
// repeat bit for bit.
//
// Measurements, also of what lost: docs/tuning/mla.md.
#pragma once

#include <flashinfer/mla/merge.cuh>
#include <flashinfer/mla/own_plan.cuh>
#include <flashinfer/mla/sm90/ring_loader.cuh>
#include <flashinfer/ptx/cluster.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/setmaxnreg.cuh>
#include <flashinfer/ptx/tma_multicast.cuh>

namespace flashinfer {

template <typename Attention>
__global__ void __launch_bounds__(Attention::Tile::kThreads, 1)
    mla_ring_kernel(const __grid_constant__ MlaSm90Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Tile = typename Attention::Tile;
  using Control = typename Attention::Control;
  extern __shared__ __align__(1024) char shared[];
  static_assert(sizeof(Control) <= Tile::kControlBytes);
  auto& control = *reinterpret_cast<Control*>(shared + Tile::kOffsetControl);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&control.full[stage]),
                         MlaRingLoader<Tile>::num_arrivals(params));
      ptx::mbarrier_init(ptx::shared_address(&control.empty[stage]), Tile::kMathThreads / 32);
    }
    if (Tile::kInPairs) Tile::PairMerge::init(control.parts_full);
    ptx::mbarrier_init_fence();
  } else if (threadIdx.x == Tile::kMathThreads && params.box_rows != 0) {
    ptx::tma_prefetch_map(&params.ckv);
    if (Tile::kDimKpe != 0) ptx::tma_prefetch_map(&params.kpe);
  }
  if constexpr (Tile::kInPairs) {
    __syncwarp();
    ptx::cluster_arrive_relaxed();
  } else {
    __syncthreads();
  }
  if (!params.mla.plan_is_older) ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (params.mla.plans_itself) {
    static_assert(sizeof(MlaOwnPlanner::Shared) <= Tile::kOwnPlanBytes);
    plan_own_share(params.mla.planner, shared + Tile::kOffsetExchange);
  }
  // Not in the roles: the compiler would then have too few registers.
  if constexpr (Tile::kInPairs) ptx::cluster_wait();
  if (threadIdx.x >= Tile::kMathThreads) {
    using Loader = MlaRingLoader<Tile>;
    ptx::decrease_registers<Tile::kLoadRegisters>();
    if (threadIdx.x >= Tile::kMathThreads + Loader::num_threads(params)) return;
    Loader(params, shared, control.full, control.empty).run();
  } else {
    ptx::increase_registers<Tile::kMathRegisters>();
    Attention(params, shared, control).run();
  }
#endif
}

}  // namespace flashinfer
