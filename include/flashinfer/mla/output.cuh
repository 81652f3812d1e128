// Writes the rows of a finished item: to the output, or as a part of it to the workspace.
#pragma once

#include <flashinfer/common/dtype.cuh>
#include <flashinfer/mla/item_rows.cuh>
#include <flashinfer/mla/mla_params.h>
#include <flashinfer/mla/row_end.cuh>

namespace flashinfer {

// Of four neighbouring lanes, lane i gets the words i of all, in their order, so that it can store
// 16 bytes where each of them has 4.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4], int lane_idx) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = (lane_idx & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) != 0) continue;
      const uint32_t low = words[i], high = words[i + distance];
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
      words[i] = upper ? other : low;
      words[i + distance] = upper ? high : other;
    }
  }
}

// Where a row of a tile goes, and the factor of what was added up for it.
template <typename O>
struct MlaRowTarget {
  O* target = nullptr;
  float factor = 0.f;
};

// Row `tile_row` of an item: of slot `slot` of the workspace, where slots have kSlotRows rows of
// kDim columns, or, if that is negative, of the output. Writes its LSE, too, if `writes_lse`.
template <typename O, int kDim, int kSlotRows>
__device__ __forceinline__ MlaRowTarget<O> begin_row(const MlaParams& params,
                                                     const MlaWorkItem& item, int slot,
                                                     int tile_row, float largest, float sum,
                                                     bool writes_lse) {
  MlaRowTarget<O> place;
  if (slot >= 0) {
    const int64_t slot_row = int64_t{slot} * kSlotRows + tile_row;
    place.target = static_cast<O*>(params.partial_o) + slot_row * kDim;
    place.factor = sum == 0.f ? 0.f : 1.f / sum;  // NaN stays NaN
    if (writes_lse) {
      params.partial_lse[slot_row] = sum == 0.f ? -math::inf : largest + math::ptx_log2(sum);
    }
  } else {
    const MlaRowEnd end(params, item.qo_begin, item.row_begin + tile_row, largest, sum);
    place.target = end.template row<O>(params);
    place.factor = end.factor;
    if (writes_lse) end.write_lse(params);
  }
  return place;
}

// `output`: the thread's accumulators in rows `row` and `row` + 8 of the tile, for columns from
// `part` times their number on.
template <typename Tile>
__device__ __forceinline__ void write_output(const MlaParams& params, const MlaWorkItem& item,
                                             const float (&output)[Tile::kOutputTiles][4],
                                             const float (&largest)[2], const float (&sum)[2],
                                             int part, int row, int lane_idx) {
  const int num_rows = mla_rows_from(params, item);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int tile_row = row + 8 * h;
    const bool exists = tile_row < num_rows;
    const bool writes_lse = exists && part == 0 && lane_idx % 4 == 0;
    using O = typename Tile::O;
    MlaRowTarget<O> place;
    if (exists) {
      place = begin_row<O, Tile::kDimCkv, Tile::kRows>(params, item, item.slot, tile_row,
                                                       largest[h], sum[h], writes_lse);
    }
    const float factor = place.factor;
    O* const target = place.target + part * (Tile::kOutputTiles * 8) + lane_idx % 4 * 8;
#pragma unroll
    for (int j = 0; j < Tile::kOutputTiles; j += 4) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] =
            PackedPair<O>::pack(output[j + i][2 * h] * factor, output[j + i][2 * h + 1] * factor);
      }
      transpose_in_quad(pairs, lane_idx);
      if (exists) {
        *reinterpret_cast<uint4*>(target + j * 8) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
}

}  // namespace flashinfer
