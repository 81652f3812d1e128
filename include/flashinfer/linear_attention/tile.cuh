// Tiles of 16-bit elements in shared memory (layout/swizzle.cuh) and products with them. The left
// operand is in registers: accumulator fragments become A fragments of the next product without
// leaving the thread. Here one warp multiplies its 16 rows (mma.sync); in warpgroup_tile.cuh four
// warps multiply together.
#pragma once

#include <cstdint>
#include <flashinfer/common/dtype.cuh>
#include <flashinfer/layout/swizzle.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/mma.cuh>

namespace flashinfer {

// kRows x kColumns, by its address in shared memory (a multiple of 1024).
template <int kRows_, int kColumns_>
struct Tile {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kBytes = kRows * kColumns * 2;
  static_assert(kColumns % 64 == 0 && kRows % 8 == 0);
  uint32_t base;

  // Address of a unit: 8 columns, 16 bytes.
  __device__ __forceinline__ uint32_t address(int row, int unit) const {
    return base + swizzled_offset<kRows>(row, unit);
  }
};

// Copies rows to a tile; rows from `valid_rows` on become zeros. A thread copies the same unit of
// every kStep-th row: the swizzle repeats after eight rows, so both addresses grow by constants.
template <int kThreads, typename T, typename TileType>
__device__ __forceinline__ void copy_tile(const TileType& tile, const T* rows, int64_t row_stride,
                                          int valid_rows) {
  constexpr int kUnits = TileType::kColumns / 8, kStep = kThreads / kUnits;
  static_assert(kThreads % kUnits == 0 && kStep % 8 == 0 && TileType::kRows % kStep == 0);
  const int row = threadIdx.x / kUnits, unit = threadIdx.x % kUnits;
  const T* from = rows + row * row_stride + unit * 8;
  const uint32_t to = tile.address(row, unit);
#pragma unroll
  for (int i = 0; i < TileType::kRows / kStep; ++i) {
    ptx::cp_async_16(to + i * kStep * 128, from, row + i * kStep < valid_rows);
    from += kStep * row_stride;
  }
}

// Products of one warp.
struct WarpProducts {
  // sums[j] += A B^T for columns 8 j of B^T, which are rows 8 j of the tile; A's columns are the
  // tile's. `a`: fragments of mma.m16n8k16, one per 16 columns.
  template <typename T, int kBlocks, int kSteps, typename TileType>
  __device__ __forceinline__ static void rows(float (&sums)[kBlocks][4],
                                              const uint32_t (&a)[kSteps][4],
                                              const TileType& tile) {
    static_assert(kBlocks * 8 <= TileType::kRows && kSteps * 16 <= TileType::kColumns);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < kBlocks; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b,
                         tile.address(8 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
        ptx::mma_m16n8k16<T>(sums[j], a[step], b[0], b[1]);
        ptx::mma_m16n8k16<T>(sums[j + 1], a[step], b[2], b[3]);
      }
    }
  }

  // sums[j] += A B for columns 8 j of the tile; A's columns are the tile's rows.
  template <typename T, int kBlocks, int kSteps, typename TileType>
  __device__ __forceinline__ static void columns(float (&sums)[kBlocks][4],
                                                 const uint32_t (&a)[kSteps][4],
                                                 const TileType& tile) {
    static_assert(kBlocks * 8 <= TileType::kColumns && kSteps * 16 <= TileType::kRows);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < kBlocks; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, tile.address(16 * step + lane % 16, j + lane / 16));
        ptx::mma_m16n8k16<T>(sums[j], a[step], b[0], b[1]);
        ptx::mma_m16n8k16<T>(sums[j + 1], a[step], b[2], b[3]);
      }
    }
  }

  template <typename... Sums>
  __device__ __forceinline__ static void begin(Sums&...) {}
  __device__ __forceinline__ static void commit() {}
  template <int kPending, int kBlocks>
  __device__ __forceinline__ static void wait(float (&)[kBlocks][4]) {}
  // Called after copies to tiles, before the barrier and the products with them.
  __device__ __forceinline__ static void fence_copies() {}
};

// Accumulators as the A fragments of 16 columns per step; `factor(j, i)` multiplies element i of
// block j.
template <typename T, int kBlocks, typename Factor>
__device__ __forceinline__ void to_fragments(uint32_t (&a)[kBlocks / 2][4],
                                             const float (&sums)[kBlocks][4],
                                             const Factor& factor) {
#pragma unroll
  for (int step = 0; step < kBlocks / 2; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 2 * step + half;
      a[step][2 * half] = PackedPair<T>::pack(sums[j][0] * factor(j, 0), sums[j][1] * factor(j, 1));
      a[step][2 * half + 1] =
          PackedPair<T>::pack(sums[j][2] * factor(j, 0), sums[j][3] * factor(j, 1));
    }
  }
}

}  // namespace flashinfer
