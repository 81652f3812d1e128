// A rank contributes its vectors to the sum, one at a time and rounded to the dtype.
#pragma once

#include <flashinfer/comm/allreduce_params.h>
#include <flashinfer/common/vec.cuh>

namespace flashinfer::row_input {

// The vector with index `vec` of a contiguous [rows, row_vecs] tensor.
template <typename T>
__device__ __forceinline__ Vector<T, 16 / sizeof(T)> load_vec(const void* tensor, int64_t vec) {
  Vector<T, 16 / sizeof(T)> x;
  x.load(static_cast<const T*>(tensor) + vec * (16 / sizeof(T)));
  return x;
}

// One tensor.
struct tensor {
  template <typename T>
  __device__ __forceinline__ static Vector<T, 16 / sizeof(T)> load(const AllReduceParams& params,
                                                                   uint32_t row, uint32_t vec) {
    return load_vec<T>(params.input, static_cast<int64_t>(row) * params.row_vecs + vec);
  }
};

// Outputs of this rank's experts, weighted, and another tensor (a shared expert's output):
//   sum over e of expert_scales[e, row] * input[e, row] + shared_input[row]
struct moe_reduction {
  template <typename T>
  __device__ __forceinline__ static Vector<T, 16 / sizeof(T)> load(const AllReduceParams& params,
                                                                   uint32_t row, uint32_t vec) {
    constexpr int kVecSize = 16 / sizeof(T);
    float sum[kVecSize] = {};
    for (uint32_t e = 0; e < params.num_terms; ++e) {
      const int64_t expert_row = static_cast<int64_t>(e) * params.num_rows + row;
      const auto x = load_vec<T>(params.input, expert_row * params.row_vecs + vec);
      const float scale = params.expert_scales[expert_row];
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) sum[i] += scale * x[i];
    }
    const auto shared =
        load_vec<T>(params.shared_input, static_cast<int64_t>(row) * params.row_vecs + vec);
    Vector<T, kVecSize> result;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) sum[i] += shared[i];
    result.from_floats(sum);
    return result;
  }
};

// A token's rows among the permuted rows of grouped products:
//   routed_scale * (sum over k of expert_weights[row, k] * input[permuted_rows[row, k]])
//     + shared_input[row]
// where rows that the input does not have add nothing.
struct moe_finalize {
  template <typename T>
  __device__ __forceinline__ static Vector<T, 16 / sizeof(T)> load(const AllReduceParams& params,
                                                                   uint32_t row, uint32_t vec) {
    constexpr int kVecSize = 16 / sizeof(T);
    float sum[kVecSize] = {};
    for (uint32_t k = 0; k < params.num_terms; ++k) {
      const int64_t term = static_cast<int64_t>(row) * params.num_terms + k;
      const int32_t permuted = params.permuted_rows[term];
      // One compare: as an unsigned number, a negative one is beyond the last row, too.
      if (static_cast<uint32_t>(permuted) >= params.num_input_rows) continue;
      const auto x =
          load_vec<T>(params.input, static_cast<int64_t>(permuted) * params.row_vecs + vec);
      const float weight = params.expert_weights == nullptr
                               ? 1.f
                               : to_float(static_cast<const T*>(params.expert_weights)[term]);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) sum[i] += weight * x[i];
    }
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) sum[i] *= params.routed_scale;
    if (params.shared_input != nullptr) {
      const auto shared =
          load_vec<T>(params.shared_input, static_cast<int64_t>(row) * params.row_vecs + vec);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) sum[i] += shared[i];
    }
    Vector<T, kVecSize> result;
    result.from_floats(sum);
    return result;
  }
};

}  // namespace flashinfer::row_input
