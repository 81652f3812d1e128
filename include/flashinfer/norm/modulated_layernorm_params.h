// Arguments of the layer norms of diffusion transformers. Plain C++: shared by kernel, launcher and
// binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// [batch_size, num_rows, hidden_size] with a contiguous last dimension; every row begins on 16
// bytes. Strides of zero repeat a row.
struct BatchedRows {
  const void* data;  // may be null where the kernel says so
  int64_t batch_stride;
  int64_t row_stride;
};

struct ModulatedLayernormParams {
  BatchedRows input;
  BatchedRows residual;      // may be null: nothing is added
  BatchedRows gate;          // only with a gate
  BatchedRows scale;         // only without affine weights
  BatchedRows shift;         // only without affine weights
  const float* gate_bias;    // [hidden_size]; may be null
  const float* scale_bias;   // [hidden_size]; may be null; with affine weights: gamma
  const float* shift_bias;   // [hidden_size]; may be null; with affine weights: beta
  const float* input_scale;  // [1]; may be null: 1
  BatchedRows sum_out;       // written
  BatchedRows normed_out;    // written
  uint32_t batch_size;
  uint32_t num_rows;
  uint32_t hidden_size;
  float eps;
  float inv_hidden_size;  // set at launch
};

}  // namespace flashinfer
