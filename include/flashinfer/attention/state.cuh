// State that a warp keeps of its query rows while it streams keys, and the rows and columns that a
// thread holds: the C fragments of mma, which wgmma shares.
#pragma once

#include <cstdint>

namespace flashinfer {

// State of a warp's rows; thread_row() maps a thread to its rows.
template <typename Tile>
struct WarpState {
  float output[Tile::kRowTiles][Tile::kOutputTiles][4];
  float largest[Tile::kRowTiles][2];  // largest exponent so far (logit * sm_scale_log2)
  float sum[Tile::kRowTiles][2];      // over this lane's columns only
};

// Exponents of the largest weight that a row may have, and of its largest one when the row grows.
// Where scales of values multiply weights, float16 has room for both (2^7 * 448), and small weights
// keep their bits.
template <typename Tile>
struct WeightRange {
  static constexpr float kMost = Tile::kDoublesRows ? 7.f : 8.f;
  static constexpr float kFirst = Tile::kDoublesRows ? 3.f : 0.f;

  // Whether `exponent` needs a larger one than the row's `largest` so far.
  static __device__ __forceinline__ bool grow(float largest, float exponent) {
    return exponent > largest + kMost;
  }
};

// Output column of element `i` (0, 1) of output tile `tile`. V of 8 bits has the even columns of a
// block of 16 in one tile and the odd columns in the next; with 4 bits every fourth column of a
// block of 32 is in one of four tiles.
template <int kInterleavedTiles>
__device__ __forceinline__ int output_column(int tile, int i) {
  constexpr int kTiles = kInterleavedTiles;
  const int quad_lane = threadIdx.x % 4;
  return tile / kTiles * (8 * kTiles) + (quad_lane * 2 + i) * kTiles + tile % kTiles;
}

// Row within the tile of this thread's first row.
template <typename Tile>
__device__ __forceinline__ int first_row() {
  return (Tile::kSplitKV ? 0 : threadIdx.x / 32 * Tile::kWarpRows) + threadIdx.x % 32 / 4;
}

// Row within the tile of row h (0, 1) of row tile i that this thread holds.
template <typename Tile>
__device__ __forceinline__ int thread_row(int i, int h) {
  if constexpr (Tile::kNarrow) return (threadIdx.x % 4 * 2 + h) % Tile::kTileQ;
  return first_row<Tile>() + 16 * i + 8 * h;
}

}  // namespace flashinfer
