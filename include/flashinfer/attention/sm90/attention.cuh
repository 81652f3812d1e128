// Attention for Hopper (sm_90a). The copy engine feeds shared memory, warpgroups multiply from it,
// and persistent CTAs, one per SM, take the plan's lists of items one after the other.
//
// One warpgroup loads (producer.cuh) and two or three multiply (consumer.cuh); tile.cuh holds what
// they share, and weights.cuh makes the softmax weights. Variants, masks and the merge of split
// rows are shared with the portable kernel (portable/attention.cuh). Sums run in a fixed order:
// results repeat bit for bit, whichever CTA takes an item.
//
// docs/design/attention_sm90.md has a timeline, docs/tuning/attention_sm90.md the measurements.
#pragma once

#include <flashinfer/attention/sm90/consumer.cuh>
#include <flashinfer/attention/sm90/producer.cuh>
#include <flashinfer/attention/sm90/widener.cuh>
#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/ptx/setmaxnreg.cuh>

namespace flashinfer {

template <typename Tile>
__device__ __forceinline__ void init_barriers(HopperControl& control) {
  constexpr int kConsumerWarps = Tile::kConsumerThreads / 32, kProducerWarps = 4;
  constexpr int kWidenerWarps = Tile::kWidens ? 4 : 0;
  const auto init = [](uint64_t& barrier, int arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  for (int i = 0; i < Tile::kStagesQ; ++i) {
    init(control.q_full[i], 1);
    init(control.q_empty[i], kConsumerWarps);
  }
  for (int i = 0; i < HopperControl::kWorkStages; ++i) {
    init(control.work_full[i], 1);
    init(control.work_empty[i], kConsumerWarps + kProducerWarps + kWidenerWarps);
  }
  for (int i = 0; i < Tile::kStages; ++i) {
    init(control.k_full[i], Tile::kWidens ? kWidenerWarps : 1);
    init(control.k_empty[i], kConsumerWarps);
    init(control.v_full[i], Tile::kTransposesV || Tile::kWidens ? 4 : 1);
    init(control.v_empty[i], kConsumerWarps);
    init(control.loaded_k_full[i], 1);
    init(control.loaded_k_empty[i], 4);
    init(control.loaded_v_full[i], 1);
    init(control.loaded_v_empty[i], 4);
  }
  ptx::mbarrier_init_fence();
}

template <typename Traits, typename Params>
__global__ void __launch_bounds__(Traits::Tile::kThreads, 1)
    hopper_attention_kernel(const __grid_constant__ HopperParams<Params> params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Tile = typename Traits::Tile;
  extern __shared__ __align__(1024) char shared[];
  HopperControl& control = *reinterpret_cast<HopperControl*>(shared + Tile::kOffsetControl);
  if (threadIdx.x == 0) init_barriers<Tile>(control);
  __syncthreads();
  ptx::grid_dependency_wait();
  if (Tile::kWidens && threadIdx.x >= Tile::kConsumerThreads + 128) {
    ptx::decrease_registers<Tile::kRegisters.widener>();
    if constexpr (Tile::kWidens) HopperWidener<Tile>(shared, control).run();
  } else if (threadIdx.x >= Tile::kConsumerThreads) {
    ptx::decrease_registers<Tile::kRegisters.producer>();
    HopperProducer<Traits, Params>(params, shared, control).run();
  } else {
    ptx::increase_registers<Tile::kRegisters.consumer>();
    HopperConsumer<Traits, Params>(params, shared, control).run();
  }
#endif
}

}  // namespace flashinfer
