// Where the scale of a group lies. A layout pads the rows and the groups per row to whole tiles.
#pragma once

#include <cstdint>
#include <flashinfer/common/math.cuh>

namespace flashinfer::layout {

// [rows, cols]
struct linear {
  static constexpr uint32_t kTileRows = 1, kTileCols = 1;
  FLASHINFER_HOST_DEVICE static int64_t offset(uint32_t row, uint32_t col, uint32_t cols, int64_t) {
    return static_cast<int64_t>(row) * cols + col;
  }
};

// [cols, stride]
struct column_major {
  static constexpr uint32_t kTileRows = 1, kTileCols = 1;
  FLASHINFER_HOST_DEVICE static int64_t offset(uint32_t row, uint32_t col, uint32_t,
                                               int64_t stride) {
    return col * stride + row;
  }
};

// Tiles of 128 rows by 4 groups, as block-scaled tensor cores read them. A row splits into
// (quarter, row in the quarter of 32), and a tile is [row in the quarter, quarter, group]. Tiles
// run along rows first.
struct swizzled_128x4 {
  static constexpr uint32_t kTileRows = 128, kTileCols = 4;
  FLASHINFER_HOST_DEVICE static int64_t offset(uint32_t row, uint32_t col, uint32_t cols, int64_t) {
    return static_cast<int64_t>(row / 128 * 128) * cols + static_cast<int64_t>(col / 4) * 512 +
           (row % 32 * 16 + row % 128 / 32 * 4 + col % 4);
  }
};

// Tiles of 8 rows by 4 groups; each tile is row-major.
struct swizzled_8x4 {
  static constexpr uint32_t kTileRows = 8, kTileCols = 4;
  FLASHINFER_HOST_DEVICE static int64_t offset(uint32_t row, uint32_t col, uint32_t cols, int64_t) {
    const int64_t tile = static_cast<int64_t>(row / 8) * (cols / 4) + col / 4;
    return tile * 32 + row % 8 * 4 + col % 4;
  }
};

}  // namespace flashinfer::layout
