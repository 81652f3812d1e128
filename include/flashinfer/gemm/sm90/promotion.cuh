// Adds the products of a block of k to a tile's sums in float32, times the block's scales.
#pragma once

#include <flashinfer/gemm/sm90/tile.cuh>

namespace flashinfer {

// Where a thread's elements of D lie, among the rows of all warpgroups.
struct GemmThread {
  int warpgroup_idx, warp_idx, lane_idx;
};

// Scales that a thread multiplies products with: of its two left rows, times that of the right rows
// where they share one, as all of them, halves or thirds do.
template <typename Tile>
struct GemmScales {
  // Right rows have a scale each, which is read when it is needed.
  static constexpr bool kReadsRight =
      Tile::kBlockScales && (Tile::kSwap || Tile::kScale == GemmScale::group);
  static constexpr bool kByColumn = Tile::kScale == GemmScale::block;
  // Gate and up columns of one part have a scale each.
  static constexpr int kSpans = Tile::kThirds ? 3
                                : !Tile::kSwap && Tile::kGated && Tile::kParts == 1 && kByColumn
                                    ? 2
                                    : 1;

  float low[kSpans], high[kSpans], columns[kSpans];
  uint32_t right, right_step;  // shared address of the scales of the right rows

  // Scales of a block: of rows, `row_step` bytes apart, and of columns.
  __device__ __forceinline__ void load(const GemmThread& thread, int rep, int part, uint32_t rows,
                                       uint32_t columns_at, uint32_t row_step) {
    if constexpr (!Tile::kBlockScales) return;
    constexpr int kPartRows = Tile::kRightRows / Tile::kParts;
    static_assert(kReadsRight || kSpans > 1 || 128 % kPartRows == 0, "a part has one scale");
    const int first = (Tile::left_group(thread.warpgroup_idx) * Tile::kReps + rep) * 64;
    const int first_right =
        Tile::right_group(thread.warpgroup_idx) * Tile::kRightRows + part * kPartRows;
    const int left = first + thread.warp_idx * 16 + thread.lane_idx / 4;
    if constexpr (!Tile::kSwap) {
      low[0] = read(rows + left * row_step);
      high[0] = read(rows + (left + 8) * row_step);
    } else if constexpr (kByColumn) {
      low[0] = high[0] = 1.f;
    } else {
      low[0] = read(columns_at + left * 4);
      high[0] = read(columns_at + left * 4 + 32);
    }
    if constexpr (kByColumn) {
      const int column = Tile::kSwap ? first : first_right;
#pragma unroll
      for (int i = 0; i < kSpans; ++i) columns[i] = read(columns_at + (index_of(column) + i) * 4);
    }
    const int row = first_right + thread.lane_idx % 4 * 2;
    right_step = Tile::kSwap ? row_step : 4;
    right = (Tile::kSwap ? rows : columns_at) + row * right_step;
  }

  // Multiplies what all sums of a row share, if need be while products are made.
  __device__ __forceinline__ void combine() {
    if constexpr (!kByColumn) return;
#pragma unroll
    for (int i = kSpans - 1; i >= 0; --i) {
      low[i] = pinned(low[0] * columns[i]);
      high[i] = pinned(high[0] * columns[i]);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void promote(float (&sums)[Tile::kTiles][4], int first,
                                          const float (&products)[kCount][4]) const {
    // A tile of fewer thirds has spans of the same size.
    constexpr int kSpan = (Tile::kThirds ? Tile::kTiles : kCount) / kSpans;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      float (&sum)[4] = sums[first + j];
      if constexpr (!Tile::kBlockScales) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += products[j][i];
      } else {
        float2 of_right = make_float2(1.f, 1.f);
        if constexpr (kReadsRight) {
          const uint32_t address = right + j * 8 * right_step;
          of_right = make_float2(read(address), read(address + right_step));
        }
        sum[0] += products[j][0] * (low[j / kSpan] * of_right.x);
        sum[1] += products[j][1] * (low[j / kSpan] * of_right.y);
        sum[2] += products[j][2] * (high[j / kSpan] * of_right.x);
        sum[3] += products[j][3] * (high[j / kSpan] * of_right.y);
      }
    }
  }

 private:
  // Index of the scale that row `local` of the tile's rows of B has.
  __device__ __forceinline__ static constexpr int index_of(int local) {
    constexpr int kPerBox = ceil_div(Tile::kBoxRowsB, 128);
    return local / Tile::kBoxRowsB * kPerBox + local % Tile::kBoxRowsB / 128;
  }

  __device__ __forceinline__ static float read(uint32_t shared) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared));
    return value;
  }

  // Keeps the compiler from moving the scale across products.
  __device__ __forceinline__ static float pinned(float scale) {
    asm volatile("" : "+f"(scale));
    return scale;
  }
};

}  // namespace flashinfer
