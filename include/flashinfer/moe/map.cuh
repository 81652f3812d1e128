// The rows of grouped products from the experts that tokens chose: a counting sort by one CTA.
//
// Each warp has a contiguous part of the choices and counts its experts. The counts before a warp,
// over all warps, and before an expert, over all experts, say where the warp's rows begin. So the
// sort is stable, and nothing depends on which warp is faster.
#pragma once

#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/moe/moe_params.h>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

inline constexpr uint32_t kMoeMapWarps = 32;           // at most
inline constexpr uint32_t kMoeMapBytes = 48 << 10;     // of shared memory, at most
inline constexpr uint32_t kMoeMapEntriesOfWarp = 128;  // before another warp takes part
inline constexpr uint32_t kMoeMapFew = 64;             // choices that are compared with each other
inline constexpr uint32_t kMoeMapFewWarps = 8;

namespace detail {

// The expert of choice `i`, or num_experts where it is elsewhere.
template <typename Id>
__device__ __forceinline__ uint32_t local_expert(const MoeMapParams& params, uint32_t i) {
  const int64_t local = static_cast<const Id*>(params.experts)[i] - params.first_expert;
  return local >= 0 && local < params.num_experts ? static_cast<uint32_t>(local)
                                                  : params.num_experts;
}

// The choices of one warp, 32 at a time.
template <typename Id>
class MoeChoices {
 public:
  __device__ __forceinline__ explicit MoeChoices(const MoeMapParams& params) : params_(params) {
    const uint32_t num_warps = blockDim.x / 32, rounds = ceil_div(params.num_entries, 32u);
    const uint32_t size = ceil_div(rounds, num_warps) * 32;
    begin_ = threadIdx.x / 32 * size;
    end_ = begin_ + size < params.num_entries ? begin_ + size : params.num_entries;
  }

  // Calls visit(i, expert, peers) for this lane's choices: `peers` are the lanes with the same
  // expert, and `expert` is num_experts where it is elsewhere or where there is no choice.
  template <typename Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
    for (uint32_t first = begin_; first < end_; first += 32 * kAtOnce) {
      uint32_t experts[kAtOnce];
#pragma unroll
      for (uint32_t n = 0; n < kAtOnce; ++n) experts[n] = load(first + n * 32 + threadIdx.x % 32);
#pragma unroll
      for (uint32_t n = 0; n < kAtOnce; ++n) {
        if (first + n * 32 >= end_) break;
        const uint32_t i = first + n * 32 + threadIdx.x % 32;
        visit(i, experts[n], __match_any_sync(0xffffffffu, experts[n]));
        __syncwarp();
      }
    }
  }

  __device__ __forceinline__ uint32_t end() const { return end_; }

 private:
  static constexpr uint32_t kAtOnce = 8;  // loads before the first use

  __device__ __forceinline__ uint32_t load(uint32_t i) const {
    return i < end_ ? local_expert<Id>(params_, i) : params_.num_experts;
  }

  const MoeMapParams& params_;
  uint32_t begin_, end_;
};

// Exclusive sums of totals, in place, by one warp; writes them to `offsets` as well.
__device__ __forceinline__ void sum_over_experts(uint32_t* totals, uint32_t num_experts,
                                                 int32_t* offsets) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t before = 0;
  for (uint32_t first = 0; first < num_experts; first += 32) {
    const uint32_t expert = first + lane;
    const uint32_t own = expert < num_experts ? totals[expert] : 0;
    uint32_t sum = own;
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
      const uint32_t lower = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += lower;
    }
    if (expert < num_experts) {
      totals[expert] = before + sum - own;
      offsets[expert] = static_cast<int32_t>(before + sum - own);
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  if (lane == 0) offsets[num_experts] = static_cast<int32_t>(before);
}

// At most kMoeMapFew choices: what comes before an expert or a choice is counted by comparing it
// with all of them, after one load and one barrier. The first product waits for this.
template <typename Id>
__device__ __forceinline__ void map_few(const MoeMapParams& params, uint32_t* chosen) {
  const uint32_t count = params.num_entries, own = threadIdx.x;
  if (own < count) chosen[own] = local_expert<Id>(params, own);
  __syncthreads();
  for (uint32_t expert = own; expert <= params.num_experts; expert += blockDim.x) {
    int32_t before = 0;
    for (uint32_t i = 0; i < count; ++i) before += chosen[i] < expert;
    params.offsets[expert] = before;
  }
  if (own >= count) return;
  const uint32_t expert = chosen[own];
  int32_t row = 0;
  for (uint32_t i = 0; i < count; ++i) {
    row += chosen[i] < expert || (chosen[i] == expert && i < own);
  }
  const bool is_here = expert < params.num_experts;
  if (is_here) params.row_token[row] = static_cast<int32_t>(own / params.top_k);
  params.entry_row[own] = is_here ? row : -1;
}

}  // namespace detail

// Id: int32_t or int64_t.
template <typename Id>
__global__ void __launch_bounds__(32 * kMoeMapWarps)
    moe_map_kernel(const __grid_constant__ MoeMapParams params) {
  extern __shared__ uint32_t moe_map_shared[];
  if (params.num_entries <= kMoeMapFew) {
    ptx::grid_launch_and_wait();
    detail::map_few<Id>(params, moe_map_shared);
    return;
  }
  const uint32_t num_experts = params.num_experts, num_warps = blockDim.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  uint32_t* const totals = moe_map_shared;        // [num_experts]
  uint32_t* const counts = totals + num_experts;  // [num_warps, num_experts]
  uint32_t* const own = counts + threadIdx.x / 32 * num_experts;
  for (uint32_t i = threadIdx.x; i < num_warps * num_experts; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  ptx::grid_launch_and_wait();

  const detail::MoeChoices<Id> choices(params);
  choices.for_each([&](uint32_t, uint32_t expert, uint32_t peers) {
    const bool is_first = (peers & ((1u << lane) - 1)) == 0;
    if (expert < num_experts && is_first) own[expert] += __popc(peers);
  });
  __syncthreads();

  for (uint32_t expert = threadIdx.x; expert < num_experts; expert += blockDim.x) {
    uint32_t sum = 0;
    for (uint32_t warp = 0; warp < num_warps; ++warp) {
      const uint32_t count = counts[warp * num_experts + expert];
      counts[warp * num_experts + expert] = sum;
      sum += count;
    }
    totals[expert] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) detail::sum_over_experts(totals, num_experts, params.offsets);
  __syncthreads();

  choices.for_each([&](uint32_t i, uint32_t expert, uint32_t peers) {
    const uint32_t lower = peers & ((1u << lane) - 1);
    if (expert < num_experts) {
      const uint32_t row = totals[expert] + own[expert] + __popc(lower);
      params.row_token[row] = static_cast<int32_t>(i / params.top_k);
      params.entry_row[i] = static_cast<int32_t>(row);
    } else if (i < choices.end()) {
      params.entry_row[i] = -1;
    }
    __syncwarp();  // all lanes have read the count
    if (expert < num_experts && lower == 0) own[expert] += __popc(peers);
  });
}

#ifndef __CUDACC_RTC__

template <typename Id>
inline cudaError_t launch_moe_map(const MoeMapParams& params, bool enable_pdl,
                                  cudaStream_t stream) {
  if (params.num_entries <= kMoeMapFew) {
    return launch_kernel(moe_map_kernel<Id>, dim3(1), dim3(32 * kMoeMapFewWarps),
                         sizeof(uint32_t) * kMoeMapFew, stream, enable_pdl, params);
  }
  const uint32_t room = kMoeMapBytes / 4 / params.num_experts - 1;
  const uint32_t most = room < kMoeMapWarps ? room : kMoeMapWarps;
  const uint32_t wanted = ceil_div(params.num_entries, kMoeMapEntriesOfWarp);
  const uint32_t num_warps = wanted < 4 ? 4 : wanted < most ? wanted : most;
  const size_t bytes = sizeof(uint32_t) * (num_warps + 1) * params.num_experts;
  return launch_kernel(moe_map_kernel<Id>, dim3(1), dim3(32 * num_warps), bytes, stream, enable_pdl,
                       params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
