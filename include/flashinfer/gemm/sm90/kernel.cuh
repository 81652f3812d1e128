// D = A B^T on Hopper (sm_90a): the copy engine feeds a ring of stages in shared memory, one or two
// warpgroups multiply from it, and persistent CTAs take tile after tile of D.
//
// One warpgroup loads (producer.cuh), the others multiply (consumer.cuh), scale and store
// (epilogue.cuh); all walk the same sequence of tiles (scheduler.cuh). Stages are loaded for the
// next tile while the last one is stored. CTAs of a cluster share an operand by multicast or split
// k among them (split.cuh). Sums have a fixed order: results repeat bit for bit.
#pragma once

#include <flashinfer/gemm/sm90/consumer.cuh>
#include <flashinfer/gemm/sm90/producer.cuh>
#include <flashinfer/ptx/cluster.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/setmaxnreg.cuh>

namespace flashinfer {

template <typename Tile>
__device__ __forceinline__ void init_gemm_barriers(GemmControl<Tile>& control) {
  constexpr int kConsumerWarps = Tile::kConsumerThreads / 32;
  const auto init = [](uint64_t& barrier, int arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  for (int i = 0; i < Tile::kStages; ++i) {
    init(control.full[i], 1 + (Tile::kGathers ? 128 : 0));
    init(control.empty[i], kConsumerWarps * Tile::kReaders);
  }
  init(control.split_full, 1);
  init(control.split_empty, kConsumerWarps * Tile::kSplits);
  for (int i = 0; i < Tile::kScaleStages; ++i) {
    init(control.scales_full[i], 32);
    init(control.scales_empty[i], kConsumerWarps);
  }
  ptx::mbarrier_init_fence();
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kLaunchThreads, 1)
    gemm_sm90_kernel(const __grid_constant__ GemmKernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  auto& control = *reinterpret_cast<GemmControl<Tile>*>(memory + Tile::kOffsetControl);
  auto* table = reinterpret_cast<GemmTableEntry*>(memory + Tile::kOffsetTable);
  if (threadIdx.x == Tile::kConsumerThreads) {
    if (!Tile::kGathers) ptx::tma_prefetch_map(&params.a);
    ptx::tma_prefetch_map(&params.b);
    if (params.stores_boxes) ptx::tma_prefetch_map(&params.d);
    if (Tile::kBlockScales && copies_box(params.scale_copy)) ptx::tma_prefetch_map(&params.a_scale);
  }
  if (threadIdx.x == 0) init_gemm_barriers<Tile>(control);
  // The next kernel may start early, too: then what precedes this one has finished.
  if (!Tile::kHasTable) ptx::grid_launch_dependents();
  if (!Tile::kFewRows && !params.gemm.starts_early) ptx::grid_dependency_wait();
  if (Tile::kHasTable) ptx::grid_launch_dependents();
  GemmScheduler<Tile>::make_table(params.gemm, table);
  __syncthreads();
  if constexpr (Tile::kCluster > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
  const uint32_t shared = ptx::shared_address(memory);
  if (threadIdx.x >= Tile::kConsumerThreads) {
    if constexpr (Tile::kMovesRegisters) ptx::decrease_registers<Tile::kProducerRegisters>();
    GemmProducer<Tile>(params, shared, table).run();
  } else {
    if constexpr (Tile::kMovesRegisters) ptx::increase_registers<Tile::kConsumerRegisters>();
    GemmConsumer<Tile>(params, shared, table).run();
  }
#endif
}

}  // namespace flashinfer
