// Adds what the experts of all ranks made of a token, in the order of the ranks.
//
//   stage   outputs go to the rank's own buffer, if they are not there already
//   gather  tells the ranks, waits for all, and reads the outputs of each token where they lie
//
// Outputs may be stored in 8 bits, which halves what crosses the link.
#pragma once

#include <flashinfer/comm/expert_memory.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/vec.cuh>

namespace flashinfer {

template <typename T_, typename Stored_, typename Out_, int kRanks_>
struct ExpertCombineTraits {
  using T = T_;
  using Stored = Stored_;
  using Out = Out_;
  static constexpr int kRanks = kRanks_;
  static constexpr int kVecSize = 8;
};

template <typename Traits>
__global__ void __launch_bounds__(512)
    expert_stage_kernel(const __grid_constant__ ExpertCombineParams params) {
  constexpr int kVecSize = Traits::kVecSize;
  ptx::grid_dependency_wait();
  const comm::CommWorkspace& workspace = params.workspace;
  auto* places = comm::at_offset<typename Traits::Stored>(workspace, workspace.rank, params.places);
  for (uint32_t source = 0; source < Traits::kRanks; ++source) {
    if (!comm::is_active(params.active, source)) continue;
    const uint32_t used = comm::tokens_from(workspace, source);
    for (uint32_t row = blockIdx.x; row < used; row += gridDim.x) {
      const int64_t first =
          (static_cast<int64_t>(source) * params.max_tokens + row) * params.row_vecs;
      for (uint32_t vec = threadIdx.x; vec < params.row_vecs; vec += blockDim.x) {
        Vector<typename Traits::T, kVecSize> x;
        x.load(static_cast<const typename Traits::T*>(params.outputs) + (first + vec) * kVecSize);
        Vector<typename Traits::Stored, kVecSize> stored;
        float values[kVecSize];
        x.to_floats(values);
        stored.from_floats(values);
        stored.store(places + (first + vec) * kVecSize);
      }
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(512)
    expert_gather_kernel(const __grid_constant__ ExpertCombineParams params) {
  constexpr int kVecSize = Traits::kVecSize, kRanks = Traits::kRanks;
  using Stored = typename Traits::Stored;
  ptx::grid_dependency_wait();
  const comm::CommWorkspace& workspace = params.workspace;
  const uint32_t peer = threadIdx.x, number = workspace.control->generation;
  if (peer < kRanks && comm::is_active(params.active, peer)) {
    if (blockIdx.x == 0) {
      ptx::release_flag(comm::expert_flag(workspace, peer, workspace.rank, ExpertFlag::kComputed),
                        number);
    }
    comm::wait_for(workspace, peer, ExpertFlag::kComputed, number, comm::Wait::kCombine);
  }
  __syncthreads();
  const int32_t* all_slots = comm::at_offset<int32_t>(workspace, workspace.rank, params.slots);
  for (uint32_t token = blockIdx.x; token < params.num_tokens; token += gridDim.x) {
    const Stored* rows[kRanks];
#pragma unroll
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const int32_t slot = all_slots[static_cast<int64_t>(token) * kRanks + rank];
      const int64_t row = static_cast<int64_t>(workspace.rank) * params.max_tokens + slot;
      // Nobody has waited for a rank that the dispatch had and the mask has no longer.
      const bool is_there = slot >= 0 && comm::is_active(params.active, rank);
      rows[rank] = is_there ? comm::at_offset<Stored>(workspace, rank, params.places) +
                                  row * params.row_vecs * kVecSize
                            : nullptr;
    }
    for (uint32_t vec = threadIdx.x; vec < params.row_vecs; vec += blockDim.x) {
      Vector<Stored, kVecSize> from[kRanks];  // all loads are under way together
#pragma unroll
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        if (rows[rank] != nullptr) from[rank].load(rows[rank] + vec * kVecSize);
      }
      float sum[kVecSize] = {};
#pragma unroll
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        if (rows[rank] == nullptr) continue;
#pragma unroll
        for (int i = 0; i < kVecSize; ++i) sum[i] += from[rank][i];
      }
      Vector<typename Traits::Out, kVecSize> result;
      result.from_floats(sum);
      const int64_t index = static_cast<int64_t>(token) * params.row_vecs + vec;
      result.store(static_cast<typename Traits::Out*>(params.combined) + index * kVecSize);
    }
  }
}

#ifndef __CUDACC_RTC__

template <typename Traits>
inline cudaError_t launch_expert_combine(const ExpertCombineParams& params, bool enable_pdl,
                                         cudaStream_t stream) {
  const uint32_t vecs = params.row_vecs < 512 ? params.row_vecs : 512;
  const dim3 threads(ceil_div(vecs, 32u) * 32);
  if (params.outputs != nullptr) {
    const dim3 ctas(comm::expert_ctas(params.workspace, params.max_tokens));
    const cudaError_t status =
        launch_kernel(expert_stage_kernel<Traits>, ctas, threads, 0, stream, enable_pdl, params);
    if (status != cudaSuccess) return status;
  }
  const dim3 ctas(comm::expert_ctas(params.workspace, params.num_tokens));
  return launch_kernel(expert_gather_kernel<Traits>, ctas, threads, 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
