// Arguments of the per-head norm with a sigmoid gate. Plain C++: shared by kernel, launcher and
// binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// Heads of a row are adjacent; every row begins on 16 bytes; strides are in elements.
struct SigmoidGateParams {
  void* input;       // [num_rows, num_heads, head_dim], read and written
  const void* gate;  // [num_rows, num_heads, head_dim]
  int64_t input_stride;
  int64_t gate_stride;
  uint32_t num_rows;
  uint32_t row_vecs;        // vectors of 16 bytes in the heads of a row
  uint32_t lanes_per_head;  // vectors of a head: a power of two, at most 32
  float eps;
  float inv_head_dim;  // set at launch
};

}  // namespace flashinfer
