// Query rows of an item or a merge of the plan: how many there are, where their parts are, what
// they see, how they are walked.
#pragma once

#include <flashinfer/common/math.cuh>
#include <flashinfer/mla/mla_params.h>

namespace flashinfer {

// Packed rows of a request from the first one of `work` on, an item or a merge: its tile has them,
// or the first of them.
template <typename Work>
__device__ __forceinline__ int mla_rows_from(const MlaParams& params, const Work& work) {
  return work.qo_len * static_cast<int>(params.num_heads.divisor) - work.row_begin;
}

// How many of them the tile has.
template <typename Work>
__device__ __forceinline__ int mla_tile_rows(const MlaParams& params, const Work& work) {
  return min(mla_rows_from(params, work), static_cast<int>(kMlaTileRows));
}

// The row of the workspace that row `row` of a merge's part `part` is in.
__device__ __forceinline__ int mla_slot_row(const MlaMerge& merge, int part, int row) {
  return (merge.slot_begin + part * merge.slot_stride) * static_cast<int>(kMlaTileRows) + row;
}

// How many tokens row `row` of the item's tile sees.
__device__ __forceinline__ int mla_visible_tokens(const MlaParams& params, const MlaWorkItem& item,
                                                  int row) {
  if (!params.causal) return item.kv_end;
  const int token = params.num_heads.divide(item.row_begin + row);
  return min(item.kv_end, item.kv_len - item.qo_len + token + 1);
}

// How often a tile of so many rows is walked by a kernel that has Tile::kRows of them at a time.
template <typename Tile>
__device__ __forceinline__ int mla_passes(int num_rows) {
  return (num_rows + Tile::kRows - 1) / Tile::kRows;
}

}  // namespace flashinfer
