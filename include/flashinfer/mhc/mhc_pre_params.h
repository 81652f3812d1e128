// Arguments of the pre mapping of hyper-connections. Plain C++: shared by kernel, launcher and
// binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// All tensors are contiguous; hidden_size is whole vectors of 16 bytes.
struct MhcPreParams {
  const float* dot_mix;  // [num_splits, num_tokens, 24]: 4 of pre, 4 of post, 4 x 4 of comb
  const float* sqrsum;   // [num_splits, num_tokens]; null if the kernel sums the squares
  const void* residual;  // [num_tokens, 4, hidden_size], at 16 bytes
  const float* scale;    // [3]: of pre, post and comb
  const float* base;     // [24]
  float* post_mix;       // [num_tokens, 4]
  float* comb_mix;       // [num_tokens, 4, 4], at 16 bytes
  void* layer_input;     // [num_tokens, hidden_size], at 16 bytes
  uint32_t num_tokens;
  uint32_t hidden_size;
  uint32_t num_splits;
  uint32_t sinkhorn_repeat;  // at least 1
  uint32_t block_size;       // threads of a CTA, whole warps, at least two; 0: set at launch
  float inv_k;               // 1 / (number of squares in a sum)
  float rms_eps;
  float pre_eps;
  float sinkhorn_eps;
  float post_mult;
};

}  // namespace flashinfer
