// Arguments of the products with weights of 4, 8 and 16 bits that read them once (gemm/portable/,
// gemm/sm90/weight_kernel.cuh). Plain C++.
#pragma once

#include <cstdint>

namespace flashinfer {

// D = act(alpha A W^T + bias) with A of 16 bits [m, k] and weights W [n, k] per group.
struct WeightGemmParams {
  const void* a;
  void* d;
  const void* weights;
  const void* scales;                          // of the weights; null for 16 bits
  const void* bias;                            // [n] per group, of D's type; null: none
  int64_t a_stride, d_stride;                  // elements from row to row
  int64_t weight_stride, weight_group_stride;  // bytes from row to row, and from group to group
  int64_t scale_stride, scale_group_stride;    // elements
  uint32_t m, n, k;
  float alpha;
  const float* alphas;    // device: a further factor, [1] or per group; null: 1
  uint32_t alpha_stride;  // 1 where alphas are per group, else 0
  // Rows from offsets[g] to offsets[g + 1] use the weights of group g; null: all use group 0.
  const int32_t* offsets;
  uint32_t num_groups;
  uint32_t token_tiles;      // of all groups, or an upper bound
  const int32_t* row_index;  // [m]: row r of D reads row row_index[r] of A; null: row r
  uint32_t num_input_rows;   // of A
  // Offsets and weights were ready before the preceding grid of the stream began, and it launches
  // its dependents only after it has waited for those before it.
  bool starts_early;
  float gate_alpha, gate_beta, gate_limit;  // of swiglu; 1, 0 and infinity for silu(g) u
  const float *gate_alphas, *gate_betas, *gate_limits;  // per group, in place of these; null: none
};

}  // namespace flashinfer
