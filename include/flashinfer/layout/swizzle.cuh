// Shared memory as the copy engine writes it with the 128-byte swizzle and as wgmma reads it:
// chunks of 128 bytes of columns, each with rows of 128 bytes, eight rows in 1024 bytes.
#pragma once

#include <cstdint>

namespace flashinfer {

// Offset of the 16-byte chunk `column` of row `row` in an operand of `kRows` rows.
template <int kRows>
__device__ __forceinline__ uint32_t swizzled_offset(int row, int column) {
  return (column / 8 * kRows + row) * 128 + ((column ^ row) % 8) * 16;
}

// The same of one chunk of rows of 64 bytes, with the 64-byte swizzle.
__device__ __forceinline__ uint32_t swizzled_offset_64(int row, int column) {
  return row * 64 + (column ^ row / 2 % 4) * 16;
}

}  // namespace flashinfer
