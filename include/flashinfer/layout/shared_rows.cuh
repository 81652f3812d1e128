// Rows in shared memory that cp.async writes and ldmatrix reads without bank conflicts.
#pragma once

#include <cstdint>
#include <flashinfer/common/math.cuh>

namespace flashinfer {

// Rows in shared memory. Any eight consecutive rows have the chunks (16 bytes) of a
// column in different banks.
//
// Rows of whole lines lie as in global memory but for the order of the chunks of a line, since
// cp.async copies line by line: to rows that are padded, and so begin within a line, it asked L2
// for 1.5 times the bytes, in 2.6 times the requests, and decode on an H200 took 8 % longer. Rows
// of other lengths are padded to an odd number of chunks.
template <int kRowBytes>
struct SharedRows {
  static constexpr bool kPermuted = kRowBytes == 64 || kRowBytes % 128 == 0;
  static constexpr int kPitch = kPermuted ? kRowBytes : (kRowBytes / 16 | 1) * 16;

  // Of the chunk at byte `column` of `row`. The rows begin at a multiple of 128 bytes.
  FLASHINFER_HOST_DEVICE static constexpr uint32_t offset(uint32_t row, uint32_t column) {
    return (row * kPitch + column) ^ permutation(row);
  }

  // From the address of a chunk to that of the one `rows` and `columns` further on, where no sum
  // has a carry: the row and the column come from have no bits in common with these.
  FLASHINFER_HOST_DEVICE static constexpr uint32_t move(uint32_t address, uint32_t rows,
                                                        uint32_t columns) {
    const uint32_t in_line = kPermuted ? columns % 128 : 0;
    return (address ^ in_line ^ permutation(rows)) + rows * kPitch + columns - in_line;
  }

 private:
  FLASHINFER_HOST_DEVICE static constexpr uint32_t permutation(uint32_t row) {
    return !kPermuted ? 0 : (kRowBytes == 64 ? row / 2 : row) % 8 * 16;
  }
};

}  // namespace flashinfer
