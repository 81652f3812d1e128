// Promotion of 8-bit products: the sums of a block of k times its scales are added to the tile's
// sums in float32.
#pragma once

#include <flashinfer/gemm/sm90/tile.cuh>

namespace flashinfer {

template <typename Tile>
class GemmPromotion {
  static constexpr int kReps = Tile::kReps, kTiles = Tile::kTiles;

 public:
  // Scales of a thread's two left rows, and the scale of all right rows where they share one.
  struct StageScales {
    float low = 1.f, high = 1.f, both = 1.f, second = 1.f;
    uint32_t right = 0, right_step = 4;  // shared address of the scales of the right rows
  };

  static constexpr bool kReadsRightScales =
      Tile::kBlockScales && (Tile::kSwap || Tile::kScale == GemmScale::group);

  __device__ __forceinline__ static float load_float(uint32_t shared) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared));
    return value;
  }

  // Scales of a block: of rows, `row_step` bytes apart, and of columns.
  __device__ __forceinline__ StageScales load_scales(int rep, int part, uint32_t rows,
                                                     uint32_t columns, uint32_t row_step) const {
    StageScales scales;
    if constexpr (Tile::kBlockScales) {
      constexpr int kPartRows = Tile::kRightRows / Tile::kParts;
      const int first = (warpgroup_idx_ * kReps + rep) * 64;
      const int low = first + warp_idx_ * 16 + lane_idx_ / 4;
      if constexpr (Tile::kSwap && Tile::kScale == GemmScale::group) {
        scales.low = load_float(columns + low * 4);
        scales.high = load_float(columns + low * 4 + 32);
      } else if constexpr (Tile::kSwap) {
        scales.both = load_float(columns + column_scale(first) * 4);
      } else {
        scales.low = load_float(rows + low * row_step);
        scales.high = load_float(rows + (low + 8) * row_step);
        if constexpr (Tile::kScale == GemmScale::block && kHalvesDiffer) {
          scales.both = load_float(columns);
          scales.second = load_float(columns + 4);
        } else if constexpr (Tile::kScale == GemmScale::block) {
          static_assert(128 % kPartRows == 0, "columns of a part share their scale");
          scales.both = load_float(columns + column_scale(part * kPartRows) * 4);
        }
      }
      const int right = part * kPartRows + lane_idx_ % 4 * 2;
      scales.right_step = Tile::kSwap ? row_step : 4;
      scales.right = (Tile::kSwap ? rows : columns) + right * scales.right_step;
    }
    return scales;
  }

  // Index of the scale that row `local` of the tile's rows of B has.
  __device__ __forceinline__ static constexpr int column_scale(int local) {
    constexpr int kPerBox = ceil_div(Tile::kBoxRowsB, 128);
    return local / Tile::kBoxRowsB * kPerBox + local % Tile::kBoxRowsB / 128;
  }

  // Gate and up columns of one part have a scale each.
  static constexpr bool kHalvesDiffer =
      !Tile::kSwap && Tile::kGated && Tile::kParts == 1 && Tile::kScale == GemmScale::block;

  // Keeps the compiler from moving the scale across products.
  __device__ __forceinline__ static float pinned(float scale) {
    asm volatile("" : "+f"(scale));
    return scale;
  }

  // Multiplies what all sums of a row share while products are made.
  __device__ __forceinline__ static void combine(StageScales& scales) {
    if constexpr (Tile::kBlockScales && !kHalvesDiffer) {
      scales.low = pinned(scales.low * scales.both);
      scales.high = pinned(scales.high * scales.both);
      scales.both = 1.f;
    }
  }

  template <int kCount>
  __device__ __forceinline__ static void promote(float (&sums)[kTiles][4], int first,
                                                 const float (&products)[kCount][4],
                                                 const StageScales& scales) {
    float low = pinned(scales.low) * scales.both;
    float high = pinned(scales.high) * scales.both;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float (&sum)[4] = sums[first + j];
      if (kHalvesDiffer && j == kCount / 2) {
        low = scales.low * scales.second;
        high = scales.high * scales.second;
      }
      if constexpr (!Tile::kBlockScales) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += products[j][i];
      } else {
        float2 right = make_float2(1.f, 1.f);
        if constexpr (kReadsRightScales) {
          const uint32_t address = scales.right + j * 8 * scales.right_step;
          right = make_float2(load_float(address), load_float(address + scales.right_step));
        }
        sum[0] += products[j][0] * (low * right.x);
        sum[1] += products[j][1] * (low * right.y);
        sum[2] += products[j][2] * (high * right.x);
        sum[3] += products[j][3] * (high * right.y);
      }
    }
  }

 protected:
  int warpgroup_idx_, warp_idx_, lane_idx_;
};

}  // namespace flashinfer
