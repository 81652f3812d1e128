// Arguments of the RMS norms with a fused following step. Plain C++: shared by kernel, launcher and
// binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// Rows have a contiguous last dimension; strides are from one row to the next.
struct FusedRmsnormParams {
  const void* input;     // [num_rows, hidden_size]
  void* residual;        // [num_rows, hidden_size], read and written; only with a residual
  const void* weight;    // [hidden_size]
  void* normed_out;      // [num_rows, hidden_size]; may be null: not written
  void* out;             // [num_rows, hidden_size] elements or codes
  void* scale;           // scales of groups of codes, [scale_rows, groups] in the module's layout
  int64_t input_stride;  // elements
  int64_t residual_stride;  // elements
  int64_t normed_stride;    // elements
  int64_t out_stride;       // bytes
  int64_t scale_stride;     // column-major scales: elements from one group to the next
  uint32_t num_rows;
  uint32_t scale_rows;  // >= num_rows: padding rows of the layout get a scale of zero
  uint32_t hidden_size;
  float eps;
  float inv_hidden_size;  // set at launch, since a division in the kernel would delay every row
  // Set at launch: how many rows later than its own a CTA prefetches to L2; 0: none.
  uint32_t rows_ahead;
  bool vectorizable;  // hidden_size is whole vectors, and every row starts at a vector
};

}  // namespace flashinfer
