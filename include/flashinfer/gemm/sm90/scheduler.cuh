// Chooses the tiles of D that a CTA computes: of the numbered tiles, cluster c of C takes c, c + C,
// ...
//
// Producer and consumers each run a scheduler and get the same sequence. Tiles are
// counted in units of a cluster's; rows come first within a band, so that the tiles that are at
// work together need few rows of A and of B.
//
// Measurements, also of what lost: docs/tuning/gemm.md.
#pragma once

#include <flashinfer/common/fast_divisor.h>
#include <flashinfer/gemm/sm90/tile.cuh>

namespace flashinfer {

// Sizes that every scheduler gets from the launch. Nothing is multiplied while a tile is found, so
// there are no divisions.
struct GemmSchedule {
  FastDivisor num_columns;  // tiles along a row of D, in clusters
  uint32_t num_rows;        // tiles along a column of D, in clusters; not by offsets or masked
  uint32_t num_tiles;       // of all batches; not by offsets or masked
  FastDivisor band;         // rows of tiles that are at work together
  FastDivisor per_band, per_batch;  // tiles
  // One more column of tiles has so many thirds, begins there, and comes after so many tiles.
  uint32_t rest_thirds, rest_column, rest_begin;
};

// Totals before a group: rows of tiles, in clusters, and rows of A.
struct GemmTableEntry {
  uint32_t tiles, rows;
};

struct GemmWork {
  uint32_t row, column;  // of D where this CTA's tile begins
  // Rows of the group; the tile may begin before them, so that it does not end after A.
  uint32_t row_begin, row_end;
  uint32_t batch;   // of A and D
  uint32_t group;   // of B
  uint32_t thirds;  // that the tile has, of 64 columns

  // The row of B (of `n`) that is row `local` of the tile.
  template <typename Tile>
  __device__ __forceinline__ uint32_t row_of_b(uint32_t local, uint32_t n) const {
    if constexpr (Tile::kGated) {
      const uint32_t box = local / Tile::kBoxRowsB;
      return column + box / 2 * Tile::kBoxRowsB + local % Tile::kBoxRowsB + box % 2 * (n / 2);
    } else {
      return column + local;
    }
  }
};

template <typename Tile>
class GemmScheduler {
  static constexpr GemmGroups kGroups = Tile::kGroups;
  static constexpr bool kHasTable = Tile::kHasTable;
  static constexpr uint32_t kUnitRows = Tile::kTileRows * Tile::kClusterRows;
  static constexpr uint32_t kUnitColumns = Tile::kOutColumns * Tile::kClusterColumns;

 public:
  __device__ __forceinline__ GemmScheduler(const GemmParams& params, const GemmSchedule& schedule,
                                           const GemmTableEntry* table)
      : params_(params), schedule_(schedule), table_(table) {
    index_ = blockIdx.x / Tile::kCluster;
    stride_ = gridDim.x / Tile::kCluster;
    num_tiles_ = kHasTable ? table[params.num_groups].tiles * schedule.num_columns.divisor
                           : schedule.num_tiles;
  }

  // The next tile; false if there is none.
  __device__ __forceinline__ bool next(GemmWork& work) {
    while (index_ < num_tiles_) {
      const bool exists = locate(index_, work);
      index_ += stride_;
      if (exists) return true;
    }
    return false;
  }

  __device__ __forceinline__ bool has_next() const { return index_ < num_tiles_; }

  // One warp sums the totals before each group, before the kernel's first barrier.
  __device__ __forceinline__ static void make_table(const GemmParams& params,
                                                    GemmTableEntry* table) {
    if (!kHasTable || threadIdx.x >= 32) return;
    // A lane has neighbours, whose loads are on their way together: each of them takes longer than
    // the sums of all lanes.
    constexpr uint32_t kOfLane = 8;
    GemmTableEntry before = {0, 0};
    for (uint32_t first = 0; first < params.num_groups; first += 32 * kOfLane) {
      const uint32_t own = first + threadIdx.x * kOfLane;
      uint32_t rows[kOfLane];
#pragma unroll
      for (uint32_t i = 0; i < kOfLane; ++i) {
        rows[i] = own + i < params.num_groups ? rows_of(params, own + i) : 0;
      }
      GemmTableEntry sum = {0, 0};
#pragma unroll
      for (uint32_t i = 0; i < kOfLane; ++i) {
        sum.tiles += ceil_div(rows[i], kUnitRows);
        sum.rows += rows[i];
      }
      const GemmTableEntry of_lane = sum;
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t tiles = __shfl_up_sync(0xffffffffu, sum.tiles, distance);
        const uint32_t more = __shfl_up_sync(0xffffffffu, sum.rows, distance);
        if (static_cast<int>(threadIdx.x) >= distance) {
          sum.tiles += tiles;
          sum.rows += more;
        }
      }
      GemmTableEntry total = {before.tiles + sum.tiles - of_lane.tiles,
                              before.rows + sum.rows - of_lane.rows};
#pragma unroll
      for (uint32_t i = 0; i < kOfLane; ++i) {
        total.tiles += ceil_div(rows[i], kUnitRows);
        total.rows += rows[i];
        if (own + i < params.num_groups) table[own + i + 1] = total;
      }
      before.tiles = __shfl_sync(0xffffffffu, total.tiles, 31);
      before.rows = __shfl_sync(0xffffffffu, total.rows, 31);
    }
    if (threadIdx.x == 0) table[0] = {0, 0};
  }

 private:
  __device__ __forceinline__ static int32_t number(const GemmParams& params, uint32_t i) {
    return __ldg(params.group_rows + i * params.group_stride);
  }

  __device__ __forceinline__ static uint32_t rows_of(const GemmParams& params, uint32_t group) {
    const int32_t rows = kGroups == GemmGroups::offsets
                             ? number(params, group + 1) - number(params, group)
                             : number(params, group);
    return rows < 0 ? 0 : static_cast<uint32_t>(rows) < params.m ? rows : params.m;
  }

  // Position of the cluster's tile `i` among `num_rows` rows of tiles.
  __device__ __forceinline__ void place(uint32_t i, uint32_t num_rows, GemmWork& work) const {
    work.thirds = 3;
    work.row_begin = 0;
    if (Tile::kThirds && i >= schedule_.rest_begin) {
      work.thirds = schedule_.rest_thirds;
      work.row = (i - schedule_.rest_begin) * kUnitRows;
      work.column = schedule_.rest_column;
      if (Tile::kClusterRows > 1) work.row += place_.row * Tile::kTileRows;
      if (Tile::kClusterColumns > 1) work.column += place_.column * work.thirds * 64;
      return;
    }
    const uint32_t most = schedule_.band.divisor, band = schedule_.per_band.divide(i);
    const uint32_t first = band * most;
    const uint32_t width = num_rows - first < most ? num_rows - first : most;
    const uint32_t within = i - band * schedule_.per_band.divisor;
    const uint32_t column = width == most ? schedule_.band.divide(within) : within / width;
    work.row = (first + within - column * width) * kUnitRows;
    work.column = column * kUnitColumns;
    if (Tile::kClusterRows > 1) work.row += place_.row * Tile::kTileRows;
    if (Tile::kClusterColumns > 1) work.column += place_.column * Tile::kOutColumns;
  }

  __device__ __forceinline__ bool locate(uint32_t index, GemmWork& work) const {
    if constexpr (kHasTable) {
      const uint32_t row_tile = schedule_.num_columns.divide(index);
      uint32_t low = 0, high = params_.num_groups;  // low's tiles <= row_tile < high's
      while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (table_[middle].tiles <= row_tile) {
          low = middle;
        } else {
          high = middle;
        }
      }
      const GemmTableEntry first = table_[low], last = table_[low + 1];
      place(index - first.tiles * schedule_.num_columns.divisor, last.tiles - first.tiles, work);
      work.row_end = last.rows - first.rows;
      work.batch = kGroups == GemmGroups::masked ? low : 0;
      if (kGroups != GemmGroups::masked) {
        const uint32_t begin = kGroups == GemmGroups::offsets ? number(params_, low) : first.rows;
        work.row += begin;
        work.row_begin = begin;
        work.row_end = begin + work.row_end < params_.m ? begin + work.row_end : params_.m;
      }
      work.group = low;
      if (params_.weight_indices != nullptr) {
        work.group = __ldg(params_.weight_indices + low * params_.weight_index_stride);
      }
      move_inside(work);
      return work.group < params_.num_weights;
    } else {
      const uint32_t batch = schedule_.per_batch.divide(index);
      place(index - batch * schedule_.per_batch.divisor, schedule_.num_rows, work);
      work.row_end = params_.m;
      work.batch = batch;
      work.group = batch;
      if constexpr (kGroups == GemmGroups::indices) {
        const int32_t group = number(params_, work.row);
        if (group < 0 || static_cast<uint32_t>(group) >= params_.num_weights) return false;
        work.group = group;
      }
      move_inside(work);
      return true;
    }
  }

  // The copy engine takes longer for a row outside a tensor than for a row inside. So the last
  // tiles overlap the ones before, and both store the same values.
  __device__ __forceinline__ void move_inside(GemmWork& work) const {
    const uint32_t m = params_.m, n = Tile::kGated ? params_.n / 2 : params_.n;
    if (m >= Tile::kTileRows && work.row > m - Tile::kTileRows) {
      if (kGroups != GemmGroups::indices) work.row = m - Tile::kTileRows;
    }
    if (!Tile::kBlockScales && n >= Tile::kOutColumns && work.column > n - Tile::kOutColumns) {
      work.column = n - Tile::kOutColumns;
    }
  }

  const GemmParams& params_;
  const GemmSchedule& schedule_;
  const GemmTableEntry* table_;
  const GemmPlace<Tile> place_;
  uint32_t index_, stride_, num_tiles_;
};

}  // namespace flashinfer
