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

}  // namespace flashinfer
