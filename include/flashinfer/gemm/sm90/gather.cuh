// Copies by threads, 16 or 4 bytes at a time: rows of A through an index map, and scales.
#pragma once

#include <flashinfer/gemm/sm90/scheduler.cuh>
#include <flashinfer/ptx/cp_async.cuh>

namespace flashinfer {

// The row of A that row `row` of D reads; an index outside A if there is none.
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

// How scales of rows are copied: by lanes, 4 bytes or 16 along k at a time, or by the copy engine,
// where memory and alignment allow it: as a box along k or along rows, or all of a tile's rows,
// which are neighbours.
enum class GemmScaleCopy : uint32_t { kWords, kAlongK, kBoxAlongK, kBoxAlongRows, kWhole };

__host__ __device__ constexpr bool copies_box(GemmScaleCopy way) {
  return way == GemmScaleCopy::kBoxAlongK || way == GemmScaleCopy::kBoxAlongRows;
}

// Scales of a tile for four blocks of k or 16: first those of the rows, a row's next to each other
// (along k) or a block's rows next to each other, then those of the columns, block after block.
//
// A lane finds its column's scales once for a tile: warps that multiply share the multiprocessor's
// slots with the lanes that copy, and each instruction here holds them up.
template <typename Tile>
class GemmScaleSource {
  static constexpr int kRows = Tile::kTileRows, kColumns = Tile::kColumnScales;
  static constexpr bool kPerColumn = Tile::kScale == GemmScale::group;
  static constexpr uint32_t kBlocks = Tile::kScaleBlocks;
  // Whether a lane copies at most one scale of the columns.
  static constexpr bool kOneColumn = Tile::kBlockScales && kBlocks * kColumns <= 32;

 public:
  __device__ __forceinline__ GemmScaleSource(const GemmParams& params, GemmScaleCopy way,
                                             const GemmWork& work, int lane_idx)
      : params_(params), work_(work), way_(way), lane_idx_(lane_idx) {
    if constexpr (kOneColumn) column_ = find_column(lane_idx % kColumns, has_column_);
    if constexpr (Tile::kBlockScales && Tile::kGathers) {
#pragma unroll
      for (int i = 0; i < ceil_div(kRows, 32); ++i) {
        sources_[i] = row_of_a<Tile>(params, work, work.row + i * 32 + lane_idx);
      }
    }
  }

  // Copies `count` blocks from `block` on; absent scales become zero. Those of rows may be a box.
  __device__ __forceinline__ void copy(uint32_t target, uint32_t block, uint32_t count) const {
    const GemmScaleMatrix& a = params_.a_scale;
    if (Tile::kGathers || (!copies_box(way_) && way_ != GemmScaleCopy::kWhole)) {
      const float* rows = a.data + work_.batch * a.stride_batch + block * a.stride_k;
      if (way_ == GemmScaleCopy::kAlongK) {
        copy_along_k(target, rows);
      } else {
        copy_words(target, rows, count);
      }
    }
    copy_columns(target + kBlocks * kRows * 4, block, count);
  }

 private:
  // Offset of the scales of this lane's row `i`, or a negative number if it has none.
  __device__ __forceinline__ int64_t offset(int i) const {
    const uint32_t row = Tile::kGathers ? sources_[i] : work_.row + i * 32 + lane_idx_;
    const bool exists = Tile::kGathers ? row != 0xffffffffu : row < work_.row_end;
    return exists ? (row >> params_.a_scale.row_shift) * params_.a_scale.stride_row : -1;
  }

  __device__ __forceinline__ void copy_along_k(uint32_t target, const float* rows) const {
#pragma unroll
    for (int i = 0; i < ceil_div(kRows, 32); ++i) {
      const uint32_t local = i * 32 + lane_idx_;
      if (kRows % 32 != 0 && local >= kRows) break;
      const int64_t source = offset(i);
      ptx::cp_async_16(target + local * 16, source < 0 ? rows : rows + source, source >= 0);
    }
  }

  __device__ __forceinline__ void copy_words(uint32_t target, const float* rows,
                                             uint32_t count) const {
#pragma unroll(Tile::kGathers ? 32 : 1)
    for (int i = 0; i < ceil_div(kRows, 32); ++i) {
      const uint32_t local = i * 32 + lane_idx_;
      if (kRows % 32 != 0 && local >= kRows) break;
      const int64_t source = offset(i);
      for (uint32_t block = 0; block < count; ++block) {
        const float* from = rows + block * params_.a_scale.stride_k;
        ptx::cp_async_4(target + (block * kRows + local) * 4, source < 0 ? rows : from + source,
                        source >= 0);
      }
    }
  }

  __device__ __forceinline__ void copy_columns(uint32_t target, uint32_t block,
                                               uint32_t count) const {
    const int64_t stride_k = params_.b_scale.stride_k;
    if constexpr (kOneColumn) {
      const uint32_t slot = lane_idx_ / kColumns, local = lane_idx_ % kColumns;
      if (slot < count) {
        ptx::cp_async_4(target + slot * Tile::kColumnScaleBytes + local * 4,
                        column_ + (block + slot) * stride_k, has_column_);
      }
    } else {
#pragma unroll 1
      for (uint32_t first = 0; first < kBlocks * kColumns; first += 32) {
        const uint32_t i = first + lane_idx_, slot = i / kColumns, local = i % kColumns;
        if (slot >= count) break;
        bool exists;
        const float* column = find_column(local, exists);
        ptx::cp_async_4(target + slot * Tile::kColumnScaleBytes + local * 4,
                        column + (block + slot) * stride_k, exists);
      }
    }
  }

  // Scales of the tile's column (or columns) `local`, or others' if it is outside B.
  __device__ __forceinline__ const float* find_column(uint32_t local, bool& exists) const {
    const GemmScaleMatrix& b = params_.b_scale;
    const uint32_t row = row_of_b(local), scale = kPerColumn ? row : row / 128;
    exists = row < params_.n;
    return b.data + work_.group * b.stride_batch + (exists ? scale : 0) * b.stride_row;
  }

  // The row of B that scale `i` belongs to.
  __device__ __forceinline__ uint32_t row_of_b(uint32_t i) const {
    constexpr uint32_t kPerBox = kPerColumn ? Tile::kBoxRowsB : ceil_div(Tile::kBoxRowsB, 128);
    const uint32_t within = i % kPerBox * (kPerColumn ? 1 : 128);
    return work_.row_of_b<Tile>(i / kPerBox * Tile::kBoxRowsB + within, params_.n);
  }

  const GemmParams& params_;
  const GemmWork& work_;
  const GemmScaleCopy way_;
  int lane_idx_;
  const float* column_ = nullptr;
  bool has_column_ = false;
  uint32_t sources_[Tile::kGathers ? ceil_div(kRows, 32) : 1];
};

}  // namespace flashinfer
