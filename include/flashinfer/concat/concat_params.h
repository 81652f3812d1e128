// Arguments of the concatenation of K's parts. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// Strides are in bytes.
struct ConcatMlaKParams {
  void* k;             // [num_tokens, num_heads, nope + rope]
  const void* k_nope;  // [num_tokens, num_heads, nope]
  const void* k_rope;  // [num_tokens, 1, rope]: shared by all heads
  int64_t k_stride_token;
  int64_t k_stride_head;
  int64_t k_nope_stride_token;
  int64_t k_nope_stride_head;
  int64_t k_rope_stride_token;
  uint32_t nope_bytes;
  uint32_t rope_bytes;
  uint32_t num_tokens;
  uint32_t num_heads;
};

}  // namespace flashinfer
