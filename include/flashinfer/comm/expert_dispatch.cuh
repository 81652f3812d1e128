// Sends each token once to every rank that has one of its experts.
//
//   place   a CTA for each rank gives its tokens places in their order: results repeat bit for bit
//   send    CTAs copy tokens into the ranks' buffers; the last one to end tells the ranks, and waits
//           for what they send
//
// An expert with a number below 0 or beyond the last one is nowhere.
#pragma once

#include <flashinfer/comm/expert_memory.cuh>
#include <flashinfer/common/launch.cuh>

namespace flashinfer {

namespace detail {

inline constexpr uint32_t kPlaceThreads = 1024;

// Copies row `token` of a payload to its places.
template <typename Unit, int kRanks>
__device__ __forceinline__ void send_row(const ExpertDispatchParams& params,
                                         const ExpertDispatchParams::Payload& payload,
                                         uint32_t token, const int32_t (&slots)[kRanks]) {
  const uint32_t units = static_cast<uint32_t>(payload.row_bytes / sizeof(Unit));
  const Unit* row = static_cast<const Unit*>(payload.data) + static_cast<int64_t>(token) * units;
  const int64_t first = static_cast<int64_t>(params.workspace.rank) * params.max_tokens;
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
    const Unit unit = row[i];
#pragma unroll
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      if (slots[rank] < 0) continue;
      Unit* places = comm::at_offset<Unit>(params.workspace, rank, payload.offset);
      places[(first + slots[rank]) * units + i] = unit;
    }
  }
}

}  // namespace detail

template <int kRanks>
__global__ void __launch_bounds__(detail::kPlaceThreads)
    expert_place_kernel(const __grid_constant__ ExpertDispatchParams params) {
  __shared__ uint32_t warp_counts[2][detail::kPlaceThreads / 32];
  ptx::grid_dependency_wait();
  const uint32_t target = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = static_cast<int64_t>(target) * params.experts_per_rank;
  int32_t* slots = comm::at_offset<int32_t>(params.workspace, params.workspace.rank, params.slots);
  const bool is_active = comm::is_active(params.active, target);
  uint32_t sent = 0, parity = 0;
  for (uint32_t begin = 0; begin < params.num_tokens; begin += blockDim.x, parity ^= 1) {
    const uint32_t token = begin + threadIdx.x;
    bool goes = false;
    for (uint32_t k = 0; is_active && token < params.num_tokens && k < params.top_k; ++k) {
      const int64_t expert = params.experts[static_cast<int64_t>(token) * params.top_k + k];
      goes |= expert >= first && expert < first + params.experts_per_rank;
    }
    const uint32_t lanes = __ballot_sync(0xffffffffu, goes);
    if (lane == 0) warp_counts[parity][warp] = __popc(lanes);
    __syncthreads();
    uint32_t before = sent + __popc(lanes & ((1u << lane) - 1));
    for (uint32_t w = 0; w < blockDim.x / 32; ++w) {
      if (w < warp) before += warp_counts[parity][w];
      sent += warp_counts[parity][w];
    }
    if (token < params.num_tokens) {
      slots[static_cast<int64_t>(token) * kRanks + target] = goes ? static_cast<int>(before) : -1;
    }
  }
  if (threadIdx.x == 0) comm::expert_header(params.workspace)->num_sent[target] = sent;
  if (threadIdx.x == 0 && target == 0) ++params.workspace.control->generation;
}

template <int kRanks>
__global__ void __launch_bounds__(512)
    expert_send_kernel(const __grid_constant__ ExpertDispatchParams params) {
  __shared__ bool is_last;
  ptx::grid_dependency_wait();
  const comm::CommWorkspace& workspace = params.workspace;
  const int32_t* all_slots = comm::at_offset<int32_t>(workspace, workspace.rank, params.slots);
  for (uint32_t token = blockIdx.x; token < params.num_tokens; token += gridDim.x) {
    int32_t slots[kRanks];
#pragma unroll
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      slots[rank] = all_slots[static_cast<int64_t>(token) * kRanks + rank];
    }
    for (uint32_t p = 0; p < params.num_payloads; ++p) {
      const ExpertDispatchParams::Payload& payload = params.payloads[p];
      if (payload.unit == 16) {
        detail::send_row<uint4>(params, payload, token, slots);
      } else if (payload.unit == 4) {
        detail::send_row<uint32_t>(params, payload, token, slots);
      } else {
        detail::send_row<uint8_t>(params, payload, token, slots);
      }
    }
  }
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < params.num_stats * kRanks;
       i += gridDim.x * blockDim.x) {
    const uint32_t rank = i / params.num_stats, column = i % params.num_stats;
    if (!comm::is_active(params.active, rank)) continue;
    comm::at_offset<int32_t>(workspace, rank,
                             params.gathered_stats)[workspace.rank * params.num_stats + column] =
        params.stats[column];
  }

  // The barrier and the fences order what all threads of all CTAs wrote before the flags.
  ExpertHeader* header = comm::expert_header(workspace);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    is_last = atomicAdd(&header->num_done, 1u) == gridDim.x - 1;
    __threadfence_system();
  }
  __syncthreads();
  const uint32_t peer = threadIdx.x;
  if (!is_last || peer >= kRanks) return;
  if (peer == 0) header->num_done = 0;
  const uint32_t number = workspace.control->generation;
  if (!comm::is_active(params.active, peer)) {
    *comm::expert_flag(workspace, workspace.rank, peer, ExpertFlag::kNumTokens) = 0;
    return;
  }
  ptx::store_peer(comm::expert_flag(workspace, peer, workspace.rank, ExpertFlag::kNumTokens),
                  header->num_sent[peer]);
  ptx::release_flag(comm::expert_flag(workspace, peer, workspace.rank, ExpertFlag::kDispatched),
                    number);
  comm::wait_for(workspace, peer, ExpertFlag::kDispatched, number, comm::Wait::kDispatch);
}

// Gives places that no token took an expert that the user calls invalid.
template <int kRanks>
__global__ void __launch_bounds__(512)
    expert_sanitize_kernel(const __grid_constant__ ExpertSanitizeParams params) {
  ptx::grid_dependency_wait();
  const uint32_t source = blockIdx.x, used = comm::tokens_from(params.workspace, source);
  int32_t* experts =
      params.experts + static_cast<int64_t>(source) * params.max_tokens * params.top_k;
  for (uint32_t i = used * params.top_k + threadIdx.x; i < params.max_tokens * params.top_k;
       i += blockDim.x) {
    experts[i] = params.invalid;
  }
}

#ifndef __CUDACC_RTC__

template <int kRanks>
inline cudaError_t launch_expert_dispatch(const ExpertDispatchParams& params, bool enable_pdl,
                                          cudaStream_t stream) {
  const uint32_t tokens = ceil_div(params.num_tokens, 32u) * 32;
  const uint32_t threads = tokens == 0 ? 32 : tokens;
  const cudaError_t status =
      launch_kernel(expert_place_kernel<kRanks>, dim3(kRanks),
                    dim3(threads < detail::kPlaceThreads ? threads : detail::kPlaceThreads), 0,
                    stream, enable_pdl, params);
  if (status != cudaSuccess) return status;
  return launch_kernel(expert_send_kernel<kRanks>,
                       dim3(comm::expert_ctas(params.workspace, params.num_tokens)), dim3(512), 0,
                       stream, enable_pdl, params);
}

template <int kRanks>
inline cudaError_t launch_expert_sanitize(const ExpertSanitizeParams& params, bool enable_pdl,
                                          cudaStream_t stream) {
  return launch_kernel(expert_sanitize_kernel<kRanks>, dim3(kRanks), dim3(512), 0, stream,
                       enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
