// Arguments of the fused norm and rotation of video tokens. Plain C++: shared by kernel, launcher
// and binding.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>
#include <flashinfer/rope/rope_params.h>

namespace flashinfer {

// Q, K or V: its columns of the projection, and its output.
struct QkNormRopePart {
  const void* weight;     // [num_heads * head_dim]; Q and K only
  void* out;              // [num_tokens, num_heads, head_dim], contiguous
  uint32_t first_column;  // in a row of qkv
  uint32_t num_heads;
  float scale;      // 8-bit outputs are multiplied by it
  float inv_width;  // set at launch: 1 / (num_heads * head_dim)
};

struct QkNormRopeParams {
  static constexpr int kNumParts = 3;
  QkNormRopePart parts[kNumParts];  // Q and K are normalised and rotated, V is copied
  const void* qkv;                  // [num_tokens, columns]
  int64_t qkv_stride;               // elements from one token to the next
  uint32_t num_tokens;
  uint32_t head_dim;
  uint32_t tokens_ahead;  // set at launch: how many tokens later a CTA prefetches to L2; 0: none
  // A token is a patch of a video: its index counts columns, then rows, then frames, then videos.
  FastDivisor columns, rows, frames;
  // Pairs of a head below `frame_pairs` rotate with the frame, pairs from there to `row_end` with
  // the row, and the others with the column.
  uint32_t frame_pairs, row_end;
  float eps;
  float attention_factor;       // factor of cosines and sines
  RopeFrequencies frequencies;  // for the pairs of a head
};

}  // namespace flashinfer
