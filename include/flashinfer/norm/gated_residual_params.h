// Arguments of the gated residual norms. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// Rows have a contiguous last dimension and begin on 16 bytes; strides are in elements.
struct GatedResidualParams {
  const void* branch;       // [num_rows, hidden_size]
  const float* residual;    // [num_rows, hidden_size]
  const void* post_weight;  // [hidden_size]; may be null: the branch is not weighted
  const float* alpha;       // [hidden_size]; may be null: alpha_value for every column
  const float* beta;        // [hidden_size]
  const void* next_weight;  // [hidden_size]; only with a next norm
  float* out;               // [num_rows, hidden_size]
  void* normed_out;         // [num_rows, hidden_size]; only with a next norm
  int64_t branch_stride;
  int64_t residual_stride;
  int64_t out_stride;
  int64_t normed_stride;
  uint32_t num_rows;
  uint32_t hidden_size;
  float alpha_value;
  float post_center;  // added to post_weight
  float next_center;  // added to next_weight
  float post_eps;
  float next_eps;
  float inv_hidden_size;  // set at launch
};

}  // namespace flashinfer
