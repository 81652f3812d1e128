// The range of a sequence's tokens.
#pragma once

#include <cstdint>
#include <flashinfer/linear_attention/tensors.h>

namespace flashinfer {

// First token and number of tokens of a sequence.
struct TokenRange {
  int64_t first;
  int32_t count;
};

// `cu_seqlens`: [batch + 1] of int32 or int64, of `num_tokens` packed tokens: a range that the
// tensors have not is cut to theirs. Null: each batch has `num_tokens`.
__device__ __forceinline__ TokenRange token_range(const void* cu_seqlens, bool is_int64,
                                                  int64_t batch, int32_t num_tokens) {
  if (cu_seqlens == nullptr) return {0, num_tokens};
  int64_t begin, end;
  if (is_int64) {
    begin = static_cast<const int64_t*>(cu_seqlens)[batch];
    end = static_cast<const int64_t*>(cu_seqlens)[batch + 1];
  } else {
    begin = static_cast<const int32_t*>(cu_seqlens)[batch];
    end = static_cast<const int32_t*>(cu_seqlens)[batch + 1];
  }
  begin = max(int64_t{0}, min(begin, int64_t{num_tokens}));
  end = max(begin, min(end, int64_t{num_tokens}));
  return {begin, static_cast<int32_t>(end - begin)};
}

template <typename T>
__device__ __forceinline__ T* token_address(const TokenHeads& tensor, int64_t batch, int64_t token,
                                            int64_t head) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch_stride + token * tensor.token_stride +
         head * tensor.head_stride;
}

}  // namespace flashinfer
