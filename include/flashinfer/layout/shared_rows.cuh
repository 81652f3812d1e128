// Rows in shared memory that cp.async writes and ldmatrix reads without bank conflicts.
//
// Measurements, also of what lost: docs/tuning/memory.md.
#pragma once

#include <cstdint>
#include <flashinfer/common/math.cuh>

namespace flashinfer {

// Rows in shared memory. Any eight consecutive rows keep the 16-byte chunks of a column in
// different banks.
//
// Rows of whole 128-byte lines lie as in global memory except for the order of chunks within a
// line, since cp.async copies line by line. Padded rows begin within a line and cost more requests
// to L2 and more bytes. Rows of other lengths are padded to an odd number of chunks.
template <int kRowBytes>
struct SharedRows {
  static constexpr bool kPermuted = kRowBytes == 64 || kRowBytes % 128 == 0;
  static constexpr int kPitch = kPermuted ? kRowBytes : (kRowBytes / 16 | 1) * 16;

  // Offset of the chunk at byte `column` of `row`. The rows begin at a multiple of 128 bytes.
  FLASHINFER_HOST_DEVICE static constexpr uint32_t offset(uint32_t row, uint32_t column) {
    return (row * kPitch + column) ^ permutation(row);
  }

  // Moves from the address of a chunk to the one `rows` and `columns` further on. The additions
  // must not carry: the chunk's row and column share no bits with `rows` and `columns`.
  FLASHINFER_HOST_DEVICE static constexpr uint32_t move(uint32_t address, uint32_t rows,
                                                        uint32_t columns) {
    const uint32_t in_line = kPermuted ? columns % 128 : 0;
    return (address ^ in_line ^ permutation(rows)) + rows * kPitch + columns - in_line;
  }

 private:
  FLASHINFER_HOST_DEVICE static constexpr uint32_t permutation(uint32_t row) {
    return !kPermuted ? 0 : (kRowBytes == 64 ? row / 2 % 4 : row % 8) * 16;
  }
};

}  // namespace flashinfer
