// Arguments of the product of one row. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// out = a b + bias; rows of `b` are contiguous.
struct OneRowParams {
  const void* a;     // [k]
  const void* b;     // [k, n]
  int64_t b_stride;  // elements
  const void* bias;  // [n] or null
  void* out;         // [n]
  uint32_t n, k;
  bool weight_ready;  // the kernel before writes neither b, nor bias, nor the norm's weight
  // With a norm the row is normed = (a + residual) rms(a + residual)^-1 norm_weight.
  const void* residual;     // [k]
  const void* norm_weight;  // [k]
  void* residual_out;       // [k], a + residual
  void* normed;             // [k]
  float eps;
  // Set at launch: rows of b of each CTA of a cluster, and as many with those of its last loads.
  uint32_t part, filled;
};

}  // namespace flashinfer
