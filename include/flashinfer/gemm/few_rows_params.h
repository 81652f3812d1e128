// Arguments of the product of few rows. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// out = a b + bias; rows of `a`, `b` and `out` are contiguous, strides are in elements.
struct FewRowsParams {
  const void* a;  // [m, k]
  int64_t a_stride;
  const void* b;  // [k, n]
  int64_t b_stride;
  const void* bias;  // [n] or null
  void* out;         // [m, n]
  int64_t out_stride;
  uint32_t m, n, k;
  bool weight_ready;  // the kernel before writes neither b nor bias
  // Set at launch: rows of b of each CTA of a cluster, and as many with those of its last loads.
  uint32_t part, filled;
};

}  // namespace flashinfer
