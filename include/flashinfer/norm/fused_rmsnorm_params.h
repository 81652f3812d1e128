// Arguments of the RMS norms with something fused behind. Plain C++: shared by kernel, launcher and
// binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// Rows have a contiguous last dimension; strides are from one row to the next.
struct FusedRmsnormParams {
  const void* input;        // [num_rows, hidden_size]
  void* residual;           // [num_rows, hidden_size], read and written; only where one is added
  const void* weight;       // [hidden_size]
  void* normed_out;         // [num_rows, hidden_size]; null: not written
  void* out;                // [num_rows, hidden_size] elements or codes
  void* scale;              // of groups of codes, [scale_rows, groups] in the order of the module
  int64_t input_stride;     // elements
  int64_t residual_stride;  // elements
  int64_t normed_stride;    // elements
  int64_t out_stride;       // bytes
  int64_t scale_stride;     // column-major scales: elements from one group to the next
  uint32_t num_rows;
  uint32_t scale_rows;  // >= num_rows: padding of the layout gets a scale of zero
  uint32_t hidden_size;
  float eps;
  float inv_hidden_size;  // set at launch: a division in the kernel is on the way of every row
  // Set at launch: how far ahead of its own a CTA brings a row to L2; 0: none.
  uint32_t rows_ahead;
  bool vectorizable;  // hidden_size is whole vectors, every row starts at one
};

}  // namespace flashinfer
