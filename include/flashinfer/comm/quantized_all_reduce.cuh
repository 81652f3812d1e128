// All-reduce whose data cross the link in 8 bits: half of what 16 bits take.
//
//   two-shot: each rank quantises the groups that another owns and pushes codes and scale; the owner
//   adds the ranks' values, quantises the sum, and pushes it to all
//
// A group of kGroup elements has a float32 scale, its largest magnitude / 448. Data travel by
// sentinel values (lamport.cuh): four codes that are all NaN look like one, and stay NaN. Each rank
// writes what it got from the owner, the owner what it pushed: all ranks hold the same bits.
#pragma once

#include <flashinfer/collective/group_max.cuh>
#include <flashinfer/comm/lamport.cuh>
#include <flashinfer/comm/quantized_all_reduce_params.h>
#include <flashinfer/common/launch.cuh>
#include <flashinfer/common/math.cuh>
#include <flashinfer/ptx/pdl.cuh>

namespace flashinfer {

template <typename T_, int kRanks_, int kGroup_>
struct QuantizedAllReduceTraits {
  using T = T_;
  static constexpr uint32_t kRanks = kRanks_, kGroup = kGroup_;
  static constexpr int kVecSize = 16;  // elements, and codes in 16 bytes
  static constexpr uint32_t kLanes = kGroup_ / kVecSize;
};

namespace detail {

// A thread's part of a group on the wire.
struct QuantizedPart {
  uint4 codes;
  float scale;
};

// All lanes of a group call.
template <typename Traits>
__device__ __forceinline__ QuantizedPart quantize_part(const float (&x)[Traits::kVecSize]) {
  MagnitudeMax<float> magnitude;
  Vector<float, Traits::kVecSize> values;
  values.from_floats(x);
  magnitude.include(values);
  const float amax = magnitude.template reduce<Traits::kLanes>();
  const float scale = amax > 0.f ? amax / 448.f : amax == amax ? 1.f : amax;
  float scaled[Traits::kVecSize];
#pragma unroll
  for (int i = 0; i < Traits::kVecSize; ++i) scaled[i] = x[i] / scale;
  Vector<dtype::float8_e4m3fn, Traits::kVecSize> codes;
  codes.from_floats(scaled);
  return {codes.words[0], scale};
}

template <typename Traits>
__device__ __forceinline__ void dequantize_part(const QuantizedPart& part,
                                                float (&x)[Traits::kVecSize]) {
  Vector<dtype::float8_e4m3fn, Traits::kVecSize> codes;
  codes.words[0] = part.codes;
#pragma unroll
  for (int i = 0; i < Traits::kVecSize; ++i) x[i] = codes[i] * part.scale;
}

// Codes and scales of groups in the receive buffers; a place is what one rank sends to another.
class QuantizedBuffers {
 public:
  __device__ __forceinline__ QuantizedBuffers(const QuantizedAllReduceParams& params, uint32_t half,
                                              uint32_t lanes)
      : workspace_(params.workspace),
        half_offset_(half * params.workspace.half_bytes),
        scales_(params.scales_offset),
        lanes_(lanes) {}

  __device__ __forceinline__ uint4* codes(uint32_t owner, int64_t group, uint32_t lane) const {
    return reinterpret_cast<uint4*>(base(owner)) + group * lanes_ + lane;
  }
  __device__ __forceinline__ uint32_t* scale(uint32_t owner, int64_t group) const {
    return reinterpret_cast<uint32_t*>(base(owner) + scales_) + group;
  }

  __device__ __forceinline__ void push(uint32_t owner, int64_t group, uint32_t lane,
                                       const QuantizedPart& part) const {
    comm::push(codes(owner, group, lane), part.codes);
    if (lane == 0) {
      ptx::store_peer(scale(owner, group), comm::without_sentinel(__float_as_uint(part.scale)));
    }
  }

  // All lanes of a group call, and no other lane of the warp runs ahead: the scale's sentinel comes
  // back when all have read it.
  __device__ __forceinline__ QuantizedPart receive(uint32_t own, int64_t group, uint32_t lane,
                                                   uint32_t peer, comm::Patience& patience) const {
    QuantizedPart part;
    uint32_t bits;
    patience.renew();
    while (!comm::has_arrived(part.codes = comm::peek(codes(own, group, lane)))) {
      patience.spend(peer);
    }
    while ((bits = ptx::load_peer_4(scale(own, group))) == comm::kSentinel) patience.spend(peer);
    __syncwarp();
    comm::put_sentinel(codes(own, group, lane));
    if (lane == 0) *scale(own, group) = comm::kSentinel;
    part.scale = __uint_as_float(bits);
    return part;
  }

 private:
  __device__ __forceinline__ char* base(uint32_t owner) const {
    return static_cast<char*>(workspace_.buffers[owner]) + half_offset_;
  }

  const comm::CommWorkspace& workspace_;
  int64_t half_offset_, scales_;
  uint32_t lanes_;
};

}  // namespace detail

// A CTA takes blocks of groups, kLanes lanes a group, and pushes a block for every owner before it
// waits, in ascending order: the lowest unfinished block can always be finished. Whole warps run
// through: lanes beyond the last group repeat it without a store of the result.
template <typename Traits>
__global__ void __launch_bounds__(256)
    quantized_all_reduce_kernel(const __grid_constant__ QuantizedAllReduceParams params) {
  using T = typename Traits::T;
  using Vec = Vector<T, Traits::kVecSize>;
  constexpr uint32_t kRanks = Traits::kRanks, kLanes = Traits::kLanes;
  constexpr int kVecSize = Traits::kVecSize;
  ptx::grid_dependency_wait();
  const comm::CallCounter counter(params.workspace.control);
  const detail::QuantizedBuffers buffers(params, counter.half(), kLanes);
  comm::Patience scattering(params.workspace.control, comm::Wait::kReduceScatter);
  comm::Patience gathering(params.workspace.control, comm::Wait::kAllGather);
  const uint32_t rank = params.workspace.rank, lane = threadIdx.x % kLanes;
  const uint32_t per_block = blockDim.x / kLanes, owned = params.owned_groups;
  const int64_t sums = int64_t{kRanks} * owned;  // where the sums of all groups arrive
  const auto index_of = [&](uint32_t owner, uint32_t group) {
    return ((int64_t{owner} * owned + group) * kLanes + lane) * kVecSize;
  };
  const auto load = [&](int64_t index, float (&x)[kVecSize]) {
    Vec vec = {};
    if (index < params.num_elements) vec.load(static_cast<const T*>(params.input) + index);
    vec.to_floats(x);
  };
  const auto store = [&](int64_t index, const detail::QuantizedPart& part) {
    float x[kVecSize];
    detail::dequantize_part<Traits>(part, x);
    Vec vec;
    vec.from_floats(x);
    if (index < params.num_elements) vec.store(static_cast<T*>(params.output) + index);
  };
  for (uint32_t first = blockIdx.x * per_block; first < owned; first += gridDim.x * per_block) {
    const uint32_t group = first + threadIdx.x / kLanes;
    const bool exists = group < owned;
    float x[kVecSize], sum[kVecSize] = {};
#pragma unroll 1
    for (uint32_t k = 1; k < kRanks; ++k) {
      const uint32_t owner = (rank + k) % kRanks;
      load(exists ? index_of(owner, group) : params.num_elements, x);
      const detail::QuantizedPart part = detail::quantize_part<Traits>(x);
      if (exists) buffers.push(owner, int64_t{rank} * owned + group, lane, part);
    }
#pragma unroll 1
    for (uint32_t r = 0; r < kRanks; ++r) {
      load(exists ? index_of(rank, group) : params.num_elements, x);
      if (r != rank) {
        // Surplus lanes read nothing, but take part in the warp's barrier.
        detail::QuantizedPart part = {};
        if (exists) {
          part = buffers.receive(rank, int64_t{r} * owned + group, lane, r, scattering);
        } else {
          __syncwarp();
        }
        detail::dequantize_part<Traits>(part, x);
      }
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) sum[i] = r == 0 ? x[i] : sum[i] + x[i];
    }
    const detail::QuantizedPart total = detail::quantize_part<Traits>(sum);
#pragma unroll 1
    for (uint32_t k = 1; k < kRanks; ++k) {
      if (!exists) break;
      buffers.push((rank + k) % kRanks, sums + int64_t{rank} * owned + group, lane, total);
    }
    if (exists) store(index_of(rank, group), total);
#pragma unroll 1
    for (uint32_t k = 1; k < kRanks; ++k) {
      const uint32_t owner = (rank + k) % kRanks;
      if (!exists) {
        __syncwarp();
        continue;
      }
      const int64_t place = sums + int64_t{owner} * owned + group;
      store(index_of(owner, group), buffers.receive(rank, place, lane, owner, gathering));
    }
  }
  counter.leave();
}

#ifndef __CUDACC_RTC__

template <typename Traits>
inline cudaError_t launch_quantized_all_reduce(const QuantizedAllReduceParams& params,
                                               bool enable_pdl, cudaStream_t stream) {
  constexpr uint32_t kThreads = 256;
  const uint32_t needed = ceil_div(params.owned_groups, kThreads / Traits::kLanes);
  const uint32_t most = params.workspace.max_ctas * (params.workspace.max_ctas >= 64 ? 2 : 1);
  return launch_kernel(quantized_all_reduce_kernel<Traits>, dim3(needed < most ? needed : most),
                       dim3(kThreads), 0, stream, enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
