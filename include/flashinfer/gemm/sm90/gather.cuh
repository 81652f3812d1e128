// Copies by threads, 16 or 4 bytes at a time: rows of A through an index map, and scales.
#pragma once

#include <flashinfer/gemm/sm90/scheduler.cuh>
#include <flashinfer/ptx/cp_async.cuh>

namespace flashinfer {

// The row of A that is row `row` of D; a number that no row has where there is none.
template <typename Tile>
__device__ __forceinline__ uint32_t row_of_a(const GemmParams& params, const GemmWork& work,
                                             uint32_t row) {
  constexpr uint32_t kNone = 0xffffffffu;
  if (row >= work.row_end) return kNone;
  if constexpr (Tile::kGathers) {
    const uint32_t source = __ldg(params.row_index + row);
    return source < params.num_input_rows ? source : kNone;
  } else {
    return row;
  }
}

// A thread's 16 bytes of every sixteenth row of a tile.
template <typename Tile>
class GemmGather {
  static constexpr int kRows = ceil_div(Tile::kTileRows, 16);  // of this thread
  static constexpr uint32_t kRowChunks = 8;

 public:
  __device__ __forceinline__ explicit GemmGather(const GemmParams& params) : params_(params) {}

  __device__ __forceinline__ void find(const GemmWork& work, int thread_idx) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows_[i] = row_of_a<Tile>(params_, work, work.row + i * 16 + thread_idx / kRowChunks);
    }
  }

  __device__ __forceinline__ void copy(uint32_t target, uint32_t block, int thread_idx) const {
    const uint32_t chunk = thread_idx % kRowChunks, first = thread_idx / kRowChunks;
    const uint32_t column = block * Tile::kTileK + chunk * (16 / Tile::kElement);
    const auto* data = static_cast<const typename Tile::A*>(params_.a.data);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t row = first + i * 16;
      if (Tile::kTileRows % 16 != 0 && row >= Tile::kTileRows) break;
      const bool exists = rows_[i] != 0xffffffffu && column < params_.k;
      const auto* source = data;
      if (exists) source += rows_[i] * params_.a.stride_row + column;
      ptx::cp_async_16(target + row * 128 + (chunk ^ row % 8) * 16, source, exists);
    }
  }

 private:
  const GemmParams& params_;
  uint32_t rows_[kRows];
};

// A lane's scales of a tile's rows, then those of its columns (or blocks of them); zeros where
// there is no such row.
template <typename Tile>
class GemmScaleSource {
  static constexpr int kRows = ceil_div(Tile::kTileRows, 32);
  static constexpr bool kPerColumn = Tile::kScale == GemmScale::group;
  static constexpr int kColumns = ceil_div(Tile::kColumnScales, 32);

 public:
  __device__ __forceinline__ GemmScaleSource(const GemmParams& params, const GemmWork& work,
                                             int lane_idx)
      : params_(params), work_(work), lane_idx_(lane_idx) {
    if constexpr (Tile::kBlockScales && Tile::kGathers) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) sources_[i] = row_of_a<Tile>(params, work, row(i));
    }
  }

  __device__ __forceinline__ void copy(uint32_t target, uint32_t block) const {
    const GemmScaleMatrix& a = params_.a_scale;
    const float* rows = a.data + work_.batch * a.stride_batch + block * a.stride_k;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t local = i * 32 + lane_idx_;
      if (Tile::kTileRows % 32 != 0 && local >= Tile::kTileRows) break;
      const uint32_t source = Tile::kGathers ? sources_[i] : row(i);
      const bool exists = Tile::kGathers ? source != 0xffffffffu : source < work_.row_end;
      const int64_t offset = (source >> a.row_shift) * a.stride_row;
      ptx::cp_async_4(target + local * 4, exists ? rows + offset : rows, exists);
    }
    const GemmScaleMatrix& b = params_.b_scale;
    const float* columns = b.data + work_.group * b.stride_batch + block * b.stride_k;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const uint32_t local = i * 32 + lane_idx_;
      if (Tile::kColumnScales % 32 != 0 && local >= Tile::kColumnScales) break;
      const uint32_t row = row_of_b(local);
      const bool exists = row < params_.n;
      const uint32_t scale = kPerColumn ? row : row / 128;
      ptx::cp_async_4(target + (Tile::kTileRows + local) * 4,
                      exists ? columns + scale * b.stride_row : columns, exists);
    }
  }

 private:
  __device__ __forceinline__ uint32_t row(int i) const { return work_.row + i * 32 + lane_idx_; }

  // The row of B whose scale is number `i`.
  __device__ __forceinline__ uint32_t row_of_b(uint32_t i) const {
    constexpr uint32_t kPerBox = kPerColumn ? Tile::kBoxRowsB : ceil_div(Tile::kBoxRowsB, 128);
    const uint32_t within = i % kPerBox * (kPerColumn ? 1 : 128);
    return work_.row_of_b<Tile>(i / kPerBox * Tile::kBoxRowsB + within, params_.n);
  }

  const GemmParams& params_;
  const GemmWork& work_;
  int lane_idx_;
  uint32_t sources_[Tile::kGathers ? kRows : 1];
};

}  // namespace flashinfer
