// Arguments of the gated activations. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>

namespace flashinfer {

struct ActAndMulParams {
  const void* input;  // [num_rows, 2 * hidden_size], last dimension contiguous
  void* out;  // [num_rows, hidden_size], last dimension contiguous; does not overlap `input`
  int64_t input_stride;  // elements from one row to the next
  int64_t out_stride;    // elements from one row to the next
  uint32_t num_rows;
  uint32_t hidden_size;
  bool vectorizable;  // hidden_size and every row's start are multiples of 16 bytes
};

}  // namespace flashinfer
