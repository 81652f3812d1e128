// Every rank sends a block to each rank and receives one from each: all-to-all, all-gather, and
// with a sum reduce-scatter. Data travel by sentinel values: see lamport.cuh.
//
// A block is [outer, inner, units] with strides on both sides, so that a transposition costs
// nothing: heads that are scattered, sequences that are gathered, states of a context's parts.
#pragma once

#include <flashinfer/comm/exchange_params.h>
#include <flashinfer/comm/lamport.cuh>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename T_, int kRanks_, bool kSum_>
struct ExchangeTraits {
  using T = T_;
  static constexpr uint32_t kRanks = kRanks_;
  static constexpr bool kSum = kSum_;
};

namespace detail {

__device__ __forceinline__ int64_t unit_offset(const ExchangeSegment& segment,
                                               const ExchangeSide& side, uint32_t index) {
  const uint32_t unit = index % segment.units, row = index / segment.units;
  return row / segment.inner * side.outer_stride + row % segment.inner * side.inner_stride + unit;
}

__device__ __forceinline__ void push_unit(uint4* address, uint4 data) { comm::push(address, data); }
__device__ __forceinline__ void push_unit(uint32_t* address, uint32_t data) {
  ptx::store_peer(address, comm::without_sentinel(data));
}

__device__ __forceinline__ uint4 peek_unit(const uint4* address) { return comm::peek(address); }
__device__ __forceinline__ uint32_t peek_unit(const uint32_t* address) {
  return ptx::load_peer_4(address);
}

__device__ __forceinline__ bool unit_has_arrived(const uint4& data) {
  return comm::has_arrived(data);
}
__device__ __forceinline__ bool unit_has_arrived(uint32_t data) { return data != comm::kSentinel; }

__device__ __forceinline__ void clear_unit(uint4* address) { comm::put_sentinel(address); }
__device__ __forceinline__ void clear_unit(uint32_t* address) { *address = comm::kSentinel; }

// Sends, then receives, unit `index` of every rank's block.
template <typename Traits, typename Unit>
__device__ __forceinline__ void exchange_unit(const ExchangeParams& params, uint32_t segment_idx,
                                              int64_t half_offset, uint32_t index,
                                              comm::Patience& patience) {
  using T = typename Traits::T;
  constexpr uint32_t kRanks = Traits::kRanks;
  const ExchangeSegment& segment = params.segments[segment_idx];
  const uint32_t rank = params.workspace.rank;
  const auto buffer = [&](uint32_t owner, uint32_t place) {
    return reinterpret_cast<Unit*>(static_cast<char*>(params.workspace.buffers[owner]) +
                                   half_offset + params.offsets[segment_idx]) +
           place * params.place_units[segment_idx] + index;
  };
  const Unit* source =
      static_cast<const Unit*>(segment.source.data) + unit_offset(segment, segment.source, index);
  Unit* target =
      static_cast<Unit*>(segment.target.data) + unit_offset(segment, segment.target, index);
  const Unit own = source[rank * segment.source.rank_stride];
#pragma unroll
  for (uint32_t k = 1; k < kRanks; ++k) {
    const uint32_t peer = (rank + k) % kRanks;
    push_unit(buffer(peer, rank < peer ? rank : rank - 1),
              source[peer * segment.source.rank_stride]);
  }
  constexpr int kVecSize = sizeof(Unit) / sizeof(T) > 0 ? sizeof(Unit) / sizeof(T) : 1;
  float sum[kVecSize] = {};
#pragma unroll 1
  for (uint32_t r = 0; r < kRanks; ++r) {
    Vector<T, kVecSize> data;
    Unit unit = own;
    if (r != rank) {
      Unit* place = buffer(rank, r < rank ? r : r - 1);
      patience.renew();
      while (!unit_has_arrived(unit = peek_unit(place))) patience.spend(r);
      clear_unit(place);
    }
    if constexpr (Traits::kSum) {
      *reinterpret_cast<Unit*>(&data) = unit;
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) sum[j] = r == 0 ? data[j] : sum[j] + data[j];
    } else {
      target[r * segment.target.rank_stride] = unit;
    }
  }
  if constexpr (Traits::kSum) {
    Vector<T, kVecSize> result;
    result.from_floats(sum);
    *target = *reinterpret_cast<const Unit*>(&result);
  }
}

}  // namespace detail

// CTAs take units in ascending order and send a unit before they wait for it, so that any number of
// resident CTAs ends.
template <typename Traits>
__global__ void __launch_bounds__(512)
    exchange_kernel(const __grid_constant__ ExchangeParams params) {
  ptx::grid_dependency_wait();
  const comm::CallCounter counter(params.workspace.control);
  const int64_t half_offset = counter.half() * params.workspace.half_bytes;
  comm::Patience patience(params.workspace.control, comm::Wait::kExchange);
  for (uint32_t s = 0; s < params.num_segments; ++s) {
    const ExchangeSegment& segment = params.segments[s];
    const uint32_t total = segment.outer * segment.inner * segment.units;
    for (uint32_t index = blockIdx.x * blockDim.x + threadIdx.x; index < total;
         index += gridDim.x * blockDim.x) {
      if (segment.is_wide) {
        detail::exchange_unit<Traits, uint4>(params, s, half_offset, index, patience);
      } else {
        detail::exchange_unit<Traits, uint32_t>(params, s, half_offset, index, patience);
      }
    }
  }
  counter.leave();
}

#ifndef __CUDACC_RTC__

template <typename Traits>
inline cudaError_t launch_exchange(const ExchangeParams& params, bool enable_pdl,
                                   cudaStream_t stream) {
  constexpr uint32_t kThreads = 256;
  uint32_t total = 0;
  for (uint32_t s = 0; s < params.num_segments; ++s) {
    const uint32_t units =
        params.segments[s].outer * params.segments[s].inner * params.segments[s].units;
    total = units > total ? units : total;
  }
  const uint32_t most = params.workspace.max_ctas * (params.workspace.max_ctas >= 64 ? 4 : 1);
  const uint32_t needed = ceil_div(total, kThreads);
  return launch_kernel(exchange_kernel<Traits>, dim3(needed < most ? needed : most), dim3(kThreads),
                       0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
