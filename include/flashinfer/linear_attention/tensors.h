// Addresses of tensors in the kernels of this family. Plain C++: shared by kernel, launcher and
// binding. Strides count elements.
#pragma once

#include <cstdint>

namespace flashinfer {

// [batch, tokens, heads, dim] with a contiguous last dimension, or [batch, tokens, heads]. Packed
// sequences have one batch, and their tokens lie one after the other.
struct TokenHeads {
  void* data;
  int64_t batch_stride;
  int64_t token_stride;
  int64_t head_stride;
};

// A pool of states, [slots, heads, rows, row]: each head's matrix is contiguous. Slots come from
// tensors that the host does not read, so a kernel asks for each of them whether the pool has it;
// one that it has not is neither read nor written.
struct StatePool {
  void* data;
  int64_t slot_stride;
  int64_t head_stride;
  int64_t num_slots;  // without data: so many that only negative slots are none

#if defined(__CUDACC__) || defined(__device__)
  __device__ __forceinline__ bool has(int64_t slot) const {
    return static_cast<uint64_t>(slot) < static_cast<uint64_t>(num_slots);
  }
#endif
};

// [batch] or [batch, tokens] slots of a pool; int32 or int64.
struct SlotIndices {
  const void* data;  // null: entry b is b
  int64_t batch_stride;
  int64_t token_stride;  // 0: one slot for all tokens
  bool is_int64;
  int64_t num_tokens;  // columns; later tokens have the slot of the last one

#if defined(__CUDACC__) || defined(__device__)
  __device__ __forceinline__ int64_t at(int64_t batch, int64_t token) const {
    if (data == nullptr) return batch;
    if (token >= num_tokens) token = num_tokens - 1;
    const int64_t i = batch * batch_stride + token * token_stride;
    return is_int64 ? static_cast<const int64_t*>(data)[i]
                    : static_cast<int64_t>(static_cast<const int32_t*>(data)[i]);
  }
#endif
};

}  // namespace flashinfer
