// Shared memory as the copy engine writes it with the 128-byte swizzle, and as wgmma reads it:
// chunks of 128 bytes of columns, in each rows of 128 bytes, groups of eight rows in 1024 bytes.
#pragma once

#include <cstdint>

namespace flashinfer {

// Where an operand of `kRows` rows keeps its 16-byte chunk `column` of row `row`.
template <int kRows>
__device__ __forceinline__ uint32_t swizzled_offset(int row, int column) {
  return (column / 8 * kRows + row) * 128 + ((column ^ row) % 8) * 16;
}

}  // namespace flashinfer
