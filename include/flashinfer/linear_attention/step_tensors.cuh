// Addresses of tensors in kernels that take one token per sequence. A cold GPU fetches arguments,
// so these are few: strides count elements and fit in 32 bits; products of theirs have 64.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>
#include <flashinfer/linear_attention/tensors.h>

namespace flashinfer {

// [batch, heads, ..], or [slots, heads, ..] of a pool.
struct StepHeads {
  void* data;
  uint32_t batch_stride, head_stride;

  template <typename Element>
  __device__ __forceinline__ Element* address(uint64_t batch, uint32_t head) const {
    return static_cast<Element*>(data) + batch * batch_stride + uint64_t{head} * head_stride;
  }
};

struct StepSlots {
  const void* data;  // null: entry b is b
  uint32_t batch_stride;
  bool is_int64;

  // `data` must not be null.
  __device__ __forceinline__ int64_t at(uint32_t batch) const {
    const uint64_t i = uint64_t{batch} * batch_stride;
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// A head's group: FastDivisor without its divisor.
struct StepGroup {
  uint32_t multiplier, shift;

  __device__ __forceinline__ uint32_t of(uint32_t head) const {
    return (static_cast<uint32_t>((uint64_t{head} * multiplier) >> 32) + head) >> shift;
  }
};

#ifndef __CUDACC_RTC__

inline bool step_stride_fits(int64_t stride) { return stride >= 0 && stride < int64_t{1} << 32; }

inline bool step_strides_fit(const TokenHeads& heads) {
  return step_stride_fits(heads.batch_stride) && step_stride_fits(heads.head_stride);
}

inline bool step_strides_fit(const StatePool& pool) {
  const bool fits = step_stride_fits(pool.slot_stride) && step_stride_fits(pool.head_stride);
  return fits && (pool.data == nullptr || step_stride_fits(pool.num_slots));
}

inline StepHeads step_heads(const TokenHeads& of) {
  return {of.data, static_cast<uint32_t>(of.batch_stride), static_cast<uint32_t>(of.head_stride)};
}

inline StepHeads step_heads(const StatePool& of) {
  return {of.data, static_cast<uint32_t>(of.slot_stride), static_cast<uint32_t>(of.head_stride)};
}

inline StepSlots step_slots(const SlotIndices& of) {
  return {of.data, static_cast<uint32_t>(of.batch_stride), of.is_int64};
}

inline StepGroup step_group(const FastDivisor& of) { return {of.multiplier, of.shift}; }

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
