// Arguments of the rotary-embedding kernels. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>
#include <flashinfer/layout/page_table.h>

namespace flashinfer {

// A [num_tokens, num_heads, dim] view whose last dimension is contiguous. Strides in elements.
struct RopeRows {
  void* data = nullptr;
  int64_t stride_token = 0;  // paged cache: from one slot of a page to the next
  int64_t stride_head = 0;
  int64_t stride_page = 0;  // paged cache only
};

// Heads that are all rotated, or all only copied (and quantised): the rotary part of Q or of K, the
// rest of either, or V.
struct RopeSegment {
  RopeRows in, out;  // `out` may be `in`
  uint32_t num_heads = 0;
  uint32_t dim = 0;
  bool rotates = false;
  bool appends = false;  // `out` is a paged cache
  float scale = 1.f;     // 8-bit outputs are multiplied by it, and caches where rows are kept
  // [dim] of the input's type: an RMS norm of each head comes before the rotation; null: none does.
  const void* norm_weight = nullptr;
  // Set at launch: how threads are numbered over (token, group of heads, unit), and the segment's
  // first CTA.
  FastDivisor units, head_groups;
  uint32_t first_cta = 0;
};

struct RopeParams {
  static constexpr int kMaxSegments = 5;
  RopeSegment segments[kMaxSegments];
  uint32_t num_segments;
  uint32_t num_tokens;
  uint32_t rope_dim;
  uint32_t tokens_per_chunk;    // set at launch: threads are counted off over so many tokens per
                                // blockIdx.y
  uint32_t rotations_per_warp;  // set at launch: entries of a warp's table of computed angles
  // Positions come from `pos_ids`, or from `indptr` and `offsets`: token i of request b is at
  // offsets[b] + i - indptr[b].
  const void* pos_ids;  // [num_tokens], int32 or int64
  bool pos_ids_are_64_bit;
  const int32_t* indptr;   // [batch_size + 1]
  const int32_t* offsets;  // [batch_size]
  uint32_t batch_size;
  // Parameters if angles are looked up.
  const void* cos_sin_cache;  // [cache_rows, rope_dim]: cosines, then sines
  int64_t cos_sin_stride;     // elements
  int64_t cache_rows;
  // Destination of K and V; only for kernels that append.
  PageTable table;
  float norm_eps;  // only where a segment has a norm
};

// Parameters if angles are computed.
struct RopeFrequencies {
  static constexpr int kMaxPairs = 256;
  // Turns (of 2 pi) per position in units of 2^-64 turn. The product with a position, modulo 2^64,
  // is the exact fraction of a turn at any position.
  uint64_t turns[kMaxPairs];
};

struct ComputedRopeParams : RopeParams {
  RopeFrequencies frequencies;
};

}  // namespace flashinfer
