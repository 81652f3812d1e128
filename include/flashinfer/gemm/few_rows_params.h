// Arguments of the products of few rows. Plain C++: shared by kernel, launcher and binding.
#pragma once

#include <cstdint>

namespace flashinfer {

// The use of the sums a b.
enum class FewRowsOutput {
  kProduct,  // out = a b + bias
  kGated,    // out = silu(first half of the columns) * second half
  kNorm,     // residual += a b; out = rmsnorm(residual)
};

// Rows of all matrices are contiguous.
struct FewRowsParams {
  const void* a;                           // [m, k]
  const void* b;                           // [k, n]
  const void* bias;                        // [n] or null
  void* out;                               // [m, n], gated [m, n / 2]
  int64_t a_stride, b_stride, out_stride;  // elements
  uint32_t m, n, k;
  uint32_t splits;    // CTAs that divide k
  bool weight_ready;  // the kernel before writes neither b nor bias nor norm_weight
  uint32_t part;      // set at launch: rows of b of each of them

  // With a norm; else unused.
  float* parts;             // [splits, m, n]: sums of each part of k
  void* residual;           // [m, n]
  int64_t residual_stride;  // elements
  const void* norm_weight;  // [n]
  float eps;
};

}  // namespace flashinfer
