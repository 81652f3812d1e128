// Writes the rows of a finished item: to the output, or as a part of it to the workspace.
#pragma once

#include <flashinfer/common/dtype.cuh>
#include <flashinfer/mla/mla_params.h>
#include <flashinfer/mla/row_end.cuh>

namespace flashinfer {

// `output`: the thread's accumulators in rows `row` and `row` + 8 of the tile, for the first or,
// with `half` 1, the second half of the columns.
template <typename Tile>
__device__ __forceinline__ void write_output(const MlaParams& params, const MlaWorkItem& item,
                                             const float (&output)[Tile::kOutputTiles][4],
                                             const float (&largest)[2], const float (&sum)[2],
                                             int half, int row, int lane_idx) {
  const int num_rows = item.qo_len * static_cast<int>(params.num_heads.divisor) - item.row_begin;
  const int column = half * (Tile::kDimCkv / 2) + lane_idx % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int tile_row = row + 8 * h;
    if (tile_row >= num_rows) continue;
    const bool writes_lse = half == 0 && lane_idx % 4 == 0;
    using O = typename Tile::O;
    O* target;
    float factor;
    if (item.slot >= 0) {
      const int64_t slot_row = int64_t{item.slot} * Tile::kRows + tile_row;
      target = static_cast<O*>(params.partial_o) + slot_row * Tile::kDimCkv;
      factor = sum[h] == 0.f ? 0.f : 1.f / sum[h];  // NaN stays NaN
      if (writes_lse) {
        params.partial_lse[slot_row] =
            sum[h] == 0.f ? -math::inf : largest[h] + math::ptx_log2(sum[h]);
      }
    } else {
      const MlaRowEnd end(params, item.qo_begin, item.row_begin + tile_row, largest[h], sum[h]);
      target = end.template row<O>(params);
      factor = end.factor;
      if (writes_lse) end.write_lse(params);
    }
#pragma unroll
    for (int j = 0; j < Tile::kOutputTiles; ++j) {
      *reinterpret_cast<typename PackedPair<O>::Bits*>(target + column + j * 8) =
          PackedPair<O>::pack(output[j][2 * h] * factor, output[j][2 * h + 1] * factor);
    }
  }
}

}  // namespace flashinfer
