// Rows of parts in the workspace, as the kernel for Hopper writes and merges them (part_merge.cuh).
//
// A row has its columns in groups of 32. In a group, the 16 bytes at place q are those that lane q
// of four holds as products leave them: columns 2 q and 2 q + 1 of each eight. So lanes need not
// exchange columns for each part, but once for each row, when parts have been added up.
#pragma once

#include <flashinfer/common/dtype.cuh>
#include <flashinfer/common/exp2.cuh>
#include <flashinfer/mla/mla_params.h>
#include <flashinfer/mla/output.cuh>

namespace flashinfer {

// Which pair of a row's columns word `word` of a part's row has.
__device__ __forceinline__ int mla_part_pair(int word) {
  return (word & ~15) + word % 4 * 4 + word / 4 % 4;
}

// `output`: the thread's accumulators in rows `row` and `row` + 8 of the tile, for columns from
// `part` times their number on. All rows of a slot are written, also those that do not exist.
template <typename Tile>
__device__ __forceinline__ void write_part(const MlaParams& params, int slot,
                                           const float (&output)[Tile::kOutputTiles][4],
                                           const float (&largest)[2], const float (&sum)[2],
                                           int part, int row, int lane_idx) {
  using O = typename Tile::O;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t slot_row = int64_t{slot} * Tile::kRows + row + 8 * h;
    const float factor = sum[h] == 0.f ? 0.f : 1.f / sum[h];  // NaN stays NaN
    if (part == 0 && lane_idx % 4 == 0) {
      params.partial_lse[slot_row] =
          sum[h] == 0.f ? -math::inf : largest[h] + math::ptx_log2(sum[h]);
    }
    O* const target = static_cast<O*>(params.partial_o) + slot_row * Tile::kDimCkv +
                      part * (Tile::kOutputTiles * 8) + lane_idx % 4 * 8;
#pragma unroll
    for (int j = 0; j < Tile::kOutputTiles; j += 4) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] =
            PackedPair<O>::pack(output[j + i][2 * h] * factor, output[j + i][2 * h + 1] * factor);
      }
      *reinterpret_cast<uint4*>(target + j * 8) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }
}

}  // namespace flashinfer
