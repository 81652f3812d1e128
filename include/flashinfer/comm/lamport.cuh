// Exchange by sentinel values: data and "it has arrived" are one store (the idea is Lamport's;
// NCCL's LL protocol and TensorRT-LLM's all-reduce use it).
//
// A receive buffer holds the sentinel in every 32-bit word. The sender replaces the sentinel in its
// data and stores; the receiver polls until no word is the sentinel, and puts the sentinel back.
// The sentinel is a NaN in float32 and a pair of NaNs in 16 bits; data that holds it gets another
// NaN, so no value changes. Words are stored and read whole, which is all the order that is needed.
//
// Two halves that calls use in turn suffice. A rank writes into a half again two calls later; the
// call between completed only with data of every rank, which each rank sent after its kernel of
// the first call, with the sentinels put back, had ended.
#pragma once

#include <flashinfer/comm/wait.cuh>
#include <flashinfer/common/vec.cuh>
#include <flashinfer/ptx/peer.cuh>

namespace flashinfer::comm {

inline constexpr uint32_t kSentinel = 0xffffffffu;
inline constexpr uint32_t kOtherNan = 0x7fff7fffu;  // NaN in float32, bfloat16 and float16

__device__ __forceinline__ uint32_t without_sentinel(uint32_t word) {
  return word == kSentinel ? kOtherNan : word;
}

// Stores 16 bytes to a buffer of any rank.
__device__ __forceinline__ void push(void* address, uint4 data) {
  ptx::store_peer(address, make_uint4(without_sentinel(data.x), without_sentinel(data.y),
                                      without_sentinel(data.z), without_sentinel(data.w)));
}

__device__ __forceinline__ uint4 peek(const void* address) { return ptx::load_peer_16(address); }

__device__ __forceinline__ bool has_arrived(const uint4& data) {
  return data.x != kSentinel && data.y != kSentinel && data.z != kSentinel && data.w != kSentinel;
}

__device__ __forceinline__ void put_sentinel(void* address) {
  *static_cast<uint4*>(address) = make_uint4(kSentinel, kSentinel, kSentinel, kSentinel);
}

// Counts the calls on a workspace without waiting for the last CTA: a CTA adds to the ticket after
// all its threads have read it, and the additions of one call sum to 2^16. The upper half is thus
// the same for every reader of one call, whatever its number of CTAs (at most 2^16).
class CallCounter {
 public:
  __device__ __forceinline__ explicit CallCounter(Control* control)
      : control_(control),
        calls_(*reinterpret_cast<volatile const uint32_t*>(&control->ticket) >> 16) {}

  __device__ __forceinline__ uint32_t half() const { return calls_ & 1u; }

  // All threads of the CTA call it once.
  __device__ __forceinline__ void leave() const {
    __syncthreads();
    if (threadIdx.x == 0) {
      atomicAdd(&control_->ticket, blockIdx.x == 0 ? (1u << 16) - (gridDim.x - 1) : 1u);
    }
  }

 private:
  Control* control_;
  uint32_t calls_;
};

}  // namespace flashinfer::comm
