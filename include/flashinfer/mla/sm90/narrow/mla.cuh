// MLA for Hopper from caches of 8 bits, for requests of few query rows: 16 at a time. The tensor
// cores' tile of 64 rows would be empty mostly, and what the other kernel does for each token,
// widening it in shared memory and reading it from there, takes longer than its bytes take to come.
//
// CTAs are persistent, one per SM; each walks its share of the plan's items. One warpgroup copies
// (copier.cuh), two multiply with mma.sync (attention.cuh). Sums run in a fixed order: results
// repeat bit for bit.
//
// Measurements, also of what lost: docs/tuning/mla.md.
#pragma once

#include <flashinfer/mla/merge.cuh>
#include <flashinfer/mla/own_plan.cuh>
#include <flashinfer/mla/sm90/narrow/attention.cuh>
#include <flashinfer/mla/sm90/narrow/copier.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/setmaxnreg.cuh>

namespace flashinfer {

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    mla_narrow_kernel(const __grid_constant__ MlaParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) char shared[];
  static_assert(sizeof(MlaNarrowControl<Tile>) <= Tile::kControlBytes);
  auto& control = *reinterpret_cast<MlaNarrowControl<Tile>*>(shared + Tile::kOffsetControl);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&control.full[stage]), Tile::kCopyThreads);
      ptx::mbarrier_init(ptx::shared_address(&control.empty[stage]), Tile::kWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();  // the merge finds no room before this CTA has ended
  if (params.plans_itself) plan_own_share(params.planner, shared);
  if (threadIdx.x >= Tile::kMathThreads) {
    ptx::decrease_registers<Tile::kCopyRegisters>();
    MlaNarrowCopier<Tile>(params, shared, control).run();
  } else {
    ptx::increase_registers<Tile::kMathRegisters>();
    MlaNarrowAttention<Tile>(params, shared, control).run();
  }
#endif
}

}  // namespace flashinfer
