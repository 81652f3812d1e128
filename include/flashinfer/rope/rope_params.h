// Arguments of the rotary-embedding kernels. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/layout/page_table.h>

namespace flashinfer {

// A [num_tokens, num_heads, dim] view whose last dimension is contiguous. Strides in elements.
struct RopeRows {
  void* data = nullptr;
  int64_t stride_token = 0;  // of a paged cache: from one slot of a page to the next
  int64_t stride_head = 0;
  int64_t stride_page = 0;  // of a paged cache only
};

// One of the tensors that a call works on. A head has a part that is rotated and one that is only
// copied (or quantised); either may be empty, and they need not be neighbours in memory.
struct RopeOperand {
  RopeRows rope_in, rope_out;  // `out` may be `in`
  RopeRows copy_in, copy_out;
  uint32_t num_heads = 0;
  uint32_t rope_dim = 0;
  uint32_t copy_dim = 0;
  float scale = 1.f;  // 8-bit outputs are multiplied by it
};

struct RopeParams {
  RopeOperand operands[3];  // Q, K and, where it goes to a cache with them, V
  uint32_t num_tokens;
  // Positions come from `pos_ids`, or from `indptr` and `offsets`: token i of request b is at
  // offsets[b] + i - indptr[b].
  const void* pos_ids;  // [num_tokens], int32 or int64
  bool pos_ids_are_64_bit;
  const int32_t* indptr;   // [batch_size + 1]
  const int32_t* offsets;  // [batch_size]
  uint32_t batch_size;
  // Angles that are looked up.
  const void* cos_sin_cache;  // [cache_rows, rope_dim]: cosines, then sines
  int64_t cos_sin_stride;     // elements
  int64_t cache_rows;
  // Destination of K and V; only for kernels that append.
  PageTable table;
};

// Angles that are computed.
struct RopeFrequencies {
  static constexpr int kMaxPairs = 256;
  // Turns (of 2 pi) per position, in units of 2^-64 of a turn: a product with a position modulo
  // 2^64 is the angle's fraction of a turn, exactly, at any position.
  uint64_t turns[kMaxPairs];
};

struct ComputedRopeParams : RopeParams {
  RopeFrequencies frequencies;
};

}  // namespace flashinfer
