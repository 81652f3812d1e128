// Shared by the kernels of the experts' all-to-all: addresses, flags, waiting.
//
//   dispatch  writes tokens into the buffers of others, then a flag in their memory
//   combine   sets a flag in the memory of others, then reads outputs from their buffers
//
// A rank dispatches again only after its combine ended, for which every rank had computed, that is
// had read the tokens; and it overwrites outputs only after it has got everyone's next tokens,
// which each sent after its own combine. So no buffer is written while it is read.
#pragma once

#include <flashinfer/comm/expert_exchange_params.h>
#include <flashinfer/comm/wait.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer::comm {

template <typename T>
__device__ __forceinline__ T* at_offset(const CommWorkspace& workspace, uint32_t rank,
                                        int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace.buffers[rank]) + offset);
}

__device__ __forceinline__ ExpertHeader* expert_header(const CommWorkspace& workspace) {
  return at_offset<ExpertHeader>(workspace, workspace.rank, 0);
}

// In the memory of `owner`: what `source` tells it.
__device__ __forceinline__ uint32_t* expert_flag(const CommWorkspace& workspace, uint32_t owner,
                                                 uint32_t source, ExpertFlag column) {
  return static_cast<uint32_t*>(workspace.flags[owner]) + source * workspace.num_flags +
         static_cast<uint32_t>(column);
}

__device__ __forceinline__ bool is_active(const ActiveRanks& active, uint32_t rank) {
  const uint64_t ranks = active.on_device == nullptr ? active.ranks : *active.on_device;
  return ranks >> rank & 1;
}

// Waits for what `source` tells in exchange `number`, or a later one.
__device__ __forceinline__ void wait_for(const CommWorkspace& workspace, uint32_t source,
                                         ExpertFlag column, uint32_t number, Wait where) {
  const uint32_t* flag = expert_flag(workspace, workspace.rank, source, column);
  Patience patience(workspace.control, where);
  while (static_cast<int32_t>(ptx::acquire_flag(flag) - number) < 0) patience.spend(source);
}

// Tokens that `source` sent in this exchange.
__device__ __forceinline__ uint32_t tokens_from(const CommWorkspace& workspace, uint32_t source) {
  return *expert_flag(workspace, workspace.rank, source, ExpertFlag::kNumTokens);
}

#ifndef __CUDACC_RTC__

// Where ranks share a GPU, waiting CTAs must leave room for those that they wait for.
inline uint32_t expert_ctas(const CommWorkspace& workspace, uint32_t needed) {
  const uint32_t most = workspace.max_ctas * (workspace.max_ctas >= 64 ? 2 : 1);
  return needed == 0 ? 1 : needed < most ? needed : most;
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer::comm
