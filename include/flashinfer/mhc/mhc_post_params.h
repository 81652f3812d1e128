// Arguments of the post mapping of hyper-connections. Plain C++: shared by kernel, launcher and
// binding.
#pragma once

#include <cstdint>
#include <flashinfer/common/fast_divisor.h>

namespace flashinfer {

// All tensors are contiguous and begin on 16 bytes; hidden_size is whole vectors of 16 bytes.
struct MhcPostParams {
  const void* x;          // [num_tokens, hidden_size]
  const void* residual;   // [num_tokens, 4, hidden_size]
  const float* post_mix;  // [num_tokens, 4]
  const float* comb_mix;  // [num_tokens, 4, 4]: from stream, to stream
  void* out;              // as residual
  uint32_t num_tokens;
  uint32_t hidden_size;
  FastDivisor vecs_per_row;  // set at launch
};

}  // namespace flashinfer
