// Arguments of the matrix products. Plain C++: shared by kernels, launchers and bindings.
#pragma once

#include <cstdint>

namespace flashinfer {

// How the 32-bit sums become values: D = scale(A, B) * A B^T.
enum class GemmScale {
  none,           // D = alpha A B^T
  token_channel,  // times a_scale[row] b_scale[column]
  block,          // a_scale[row, k / 128] b_scale[column / 128, k / 128], applied per 128 of k
  group,          // a_scale[row, k / 128] b_scale[column, k / 128], applied per 128 of k
};

// Chooses the matrix of B that a row of A is multiplied by.
enum class GemmGroups {
  batch,    // A [batch, m, k], B [batch, n, k]
  offsets,  // A [m, k]: rows from offsets[g] to offsets[g + 1] use B[g]
  lengths,  // A [m, k]: the next lengths[g] rows use B[g]
  masked,   // A [groups, m, k]: the first counts[g] rows of A[g] use B[g]
  indices,  // A [m, k]: rows use B[indices[row]], the same for 128 rows; none if negative
};

// The operation that follows the product and its bias. The gated ones halve the columns: D [m, n /
// 2], with gates g and values u from the two halves of B's rows.
enum class GemmActivation {
  identity,
  relu2,  // max(x, 0)^2
  // g sigmoid(gate_alpha g) (u + gate_beta). gate_limit bounds g from above and u on both sides.
  // The first half of B's rows makes gates.
  swiglu,
  // The same; the first half makes values.
  swiglu_gate_last,
  // g Phi(g) u, with the normal distribution Phi. The first half makes values.
  geglu_gate_last,
};

constexpr bool is_gated(GemmActivation activation) {
  return activation == GemmActivation::swiglu || activation == GemmActivation::swiglu_gate_last ||
         activation == GemmActivation::geglu_gate_last;
}

// A matrix per batch or group; the last dimension is contiguous.
struct GemmMatrix {
  void* data;
  int64_t stride_row;    // elements
  int64_t stride_batch;  // elements
};

// Scales of one operand; strides in elements.
struct GemmScaleMatrix {
  const float* data;
  int64_t stride_row;    // from one row (or block of 128 rows) of the operand to the next
  int64_t stride_k;      // from one block of 128 along k to the next
  int64_t stride_batch;  // from one batch or group to the next
  uint32_t row_shift;    // 7 where 128 rows of A share a scale, else 0
};

struct GemmParams {
  GemmMatrix a, b, d;
  GemmScaleMatrix a_scale, b_scale;
  uint32_t m, n, k;  // of each batch or masked group; m of all groups together by offsets
  uint32_t num_groups;
  uint32_t num_weights;  // matrices of B; other numbers of weight_indices or indices skip the rows
  float alpha;
  float gate_alpha, gate_beta, gate_limit;  // of swiglu; 1, 0 and infinity for silu(g) u
  // Further factors of alpha, on the device; null: 1. The second is [1] with stride 0 or, in
  // groups, [num_weights] with stride 1.
  const float *alpha_a, *alpha_b;
  uint32_t alpha_b_stride;
  const void* bias;  // [n] of D's type, in groups [num_weights, n]; null: none
  // Offsets [groups + 1], lengths or counts [groups], or indices [m]. Only the lower half
  // of a 64-bit number is read: neighbours are group_stride (1 or 2) apart.
  const int32_t* group_rows;
  const int32_t* weight_indices;  // [groups]: group g uses B[weight_indices[g]]; null: B[g]
  uint32_t group_stride, weight_index_stride;
  const int32_t* row_index;  // [m]: row r of the product reads row row_index[r] of A
  const float* row_weight;   // [m]: factor of each row of D; null: 1
  uint32_t num_input_rows;   // of A where row_index is given
  // The previous kernel of the stream writes nothing but A and its scales: weights are loaded while
  // it runs. What it follows has finished.
  bool starts_early;
  uint32_t max_ctas;  // SMs that the launch may use; 0: all
  // [num_weights], in place of gate_alpha, gate_beta and gate_limit in groups; null: none
  const float *gate_alphas, *gate_betas, *gate_limits;
  // Where D has 8 bits: with block scales, the kernel writes [m, columns of D / 128] scales, and
  // else it multiplies D by a factor, [1] with stride 0 or [num_weights] with stride 1.
  float* d_scale;
  const float* out_factor;
  uint32_t out_factor_stride;
};

}  // namespace flashinfer
