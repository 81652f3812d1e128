// In place of the product's header, which says what the instructions do.
#pragma once

#include <flashinfer/ptx/cp_async.cuh>

namespace flashinfer::ptx {

namespace emulated {

// Addresses of the rows of the four matrices.
inline const uint32_t* exchange_rows(uint32_t address) {
  if (address % 16 != 0) emulation::fail("ldmatrix of a misaligned row");
  if (address + 16 > emulation::shared_bytes) emulation::fail("ldmatrix past shared memory");
  return emulation::block.exchange(address);
}

}  // namespace emulated

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  const int lane = threadIdx.x % 32;
  const uint32_t* rows = emulated::exchange_rows(address);
  for (int i = 0; i < 4; ++i) {
    std::memcpy(&r[i], dynamic_shared + rows[8 * i + lane / 4] + lane % 4 * 4, 4);
  }
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  const int lane = threadIdx.x % 32;
  const uint32_t* rows = emulated::exchange_rows(address);
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      std::memcpy(&pair[j], dynamic_shared + rows[8 * i + lane % 4 * 2 + j] + lane / 4 * 2, 2);
    }
    r[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}

inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  const int lane = threadIdx.x % 32;
  const uint32_t* rows = emulated::exchange_rows(address);
  for (int i = 0; i < 4; ++i) {
    std::memcpy(dynamic_shared + rows[8 * i + lane / 4] + lane % 4 * 4, &r[i], 4);
  }
}

inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  const int lane = threadIdx.x % 32;
  const uint32_t* rows = emulated::exchange_rows(address);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const uint16_t element = static_cast<uint16_t>(r[i] >> 16 * j);
      std::memcpy(dynamic_shared + rows[8 * i + lane % 4 * 2 + j] + lane / 4 * 2, &element, 2);
    }
  }
}

inline uint32_t movmatrix_trans(uint32_t matrix) {
  const int lane = threadIdx.x % 32;
  const uint32_t* pairs = emulation::block.exchange(matrix);
  uint32_t transposed = 0;
  for (int j = 0; j < 2; ++j) {
    const uint32_t pair = pairs[(lane % 4 * 2 + j) * 4 + lane / 8];
    transposed |= (pair >> (lane / 4 % 2 * 16) & 0xffffu) << (16 * j);
  }
  return transposed;
}

}  // namespace flashinfer::ptx
