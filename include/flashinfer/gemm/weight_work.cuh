// A CTA of the products with unpacked weights computes columns of some tokens of a group.
#pragma once

#include <flashinfer/common/math.cuh>
#include <flashinfer/gemm/weight_gemm_params.h>

namespace flashinfer {

// Tokens of one group that a CTA multiplies by its weights, and the first column of the result.
struct WeightGemmWork {
  uint32_t group, row, row_end, column;
};

// The rows of a group that exist.
struct GroupRows {
  int32_t begin, end;
};

__device__ __forceinline__ GroupRows group_rows(const WeightGemmParams& params, uint32_t group) {
  if (group >= params.num_groups) return {0, 0};
  const int32_t begin = __ldg(params.offsets + group), end = __ldg(params.offsets + group + 1);
  const int32_t m = static_cast<int32_t>(params.m);
  return {begin < 0 ? 0 : begin, end > m ? m : end};
}

template <typename Tile>
__device__ __forceinline__ uint32_t group_tiles(const GroupRows& rows) {
  return rows.end > rows.begin ? ceil_div<uint32_t>(rows.end - rows.begin, Tile::kTokens) : 0;
}

// The row of the weights that row `local` of the CTA's is; n if there is none. The first half of a
// gated CTA's rows is of the first half of the weights.
template <typename Tile>
__device__ __forceinline__ uint32_t weight_row(const WeightGemmParams& params, uint32_t column,
                                               uint32_t local) {
  constexpr uint32_t kOut = Tile::kOutColumns;
  const uint32_t n = Tile::kGated ? params.n / 2 : params.n;
  const uint32_t row = column + local % kOut;
  if (row >= n) return params.n;
  return Tile::kGated && local >= kOut ? row + n : row;
}

}  // namespace flashinfer
