// In place of the product's header: products of operands in shared memory, or of 16-bit fragments
// in registers with them. A descriptor is the operand's address, with the distance between its
// blocks of 64 columns and of 8 rows above, in KiB; a product is there when it is asked for.
#pragma once

#include <flashinfer/common/dtype.cuh>
#include <flashinfer/ptx/shared.cuh>

namespace flashinfer::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
inline void wgmma_wait() {}
template <int kTiles>
inline void wgmma_done(float (&)[kTiles][4]) {}

inline uint64_t wgmma_operand(uint32_t address, uint32_t chunk_stride = 0,
                              uint32_t group_stride = 1024) {
  if ((chunk_stride | group_stride) % 1024 != 0) emulation::fail("an operand of other strides");
  return address | uint64_t{chunk_stride / 1024} << 32 | uint64_t{group_stride / 1024} << 48;
}
// A bit above tells rows of 64 bytes.
inline uint64_t wgmma_operand_64(uint32_t address) { return address | uint64_t{1} << 63; }
inline uint64_t wgmma_advance(uint64_t operand, uint32_t bytes) { return operand + bytes; }

namespace emulated {

// Element k of row `row` of a K-major operand, or of column `row` of an MN-major one.
template <typename T, bool kTransposed>
float operand_element(uint64_t operand, int row, int k) {
  const uint32_t address = static_cast<uint32_t>(operand);
  if (operand >> 63 != 0) {
    const uint32_t rows = address / 512 * 512, byte = k * sizeof(T);
    const uint32_t unit = (address % 64 / 16 + byte / 16) ^ row / 2 % 4;
    return to_float(load_shared<T>(rows + row * 64 + unit * 16 + byte % 16));
  }
  const uint32_t group_stride = operand >> 48 << 10;
  if constexpr (kTransposed) {
    const uint32_t chunk = address + row / 64 * ((operand >> 32 & 0xffff) << 10);
    const uint32_t unit = row % 64 / 8 ^ k % 8;
    return to_float(
        load_shared<T>(chunk + k / 8 * group_stride + k % 8 * 128 + unit * 16 + row % 8 * 2));
  } else {
    const uint32_t rows = address / 1024 * 1024, byte = k * sizeof(T);
    const uint32_t unit = (address % 128 / 16 + byte / 16) ^ row % 8;
    return to_float(
        load_shared<T>(rows + row / 8 * group_stride + row % 8 * 128 + unit * 16 + byte % 16));
  }
}

// The lanes of a warp hold 16 rows, each lane a word of a fragment.
template <typename T>
void read_fragments(const uint32_t (&a)[4], float (&rows)[2][16]) {
  const int lane = threadIdx.x % 32;
  for (int r = 0; r < 4; ++r) {
    const uint32_t* words = emulation::block.exchange(a[r]);
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = words[lane / 4 * 4 + i / 2];
      rows[r % 2][r / 2 * 8 + i] = to_float(T{static_cast<uint16_t>(word >> i % 2 * 16)});
    }
  }
}

}  // namespace emulated

template <typename T, bool kTransposeB, typename TB = T, int kTiles, typename A>
inline void wgmma(float (&d)[kTiles][4], const A& a, uint64_t b, bool accumulate) {
  constexpr int kDepth = 32 / sizeof(T);
  const int first = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  float rows[2][kDepth];
  if constexpr (std::is_same_v<A, uint64_t>) {
    for (int h = 0; h < 2; ++h) {
      for (int k = 0; k < kDepth; ++k) {
        rows[h][k] = emulated::operand_element<T, false>(a, first + 8 * h, k);
      }
    }
  } else {
    emulated::read_fragments<T>(a, rows);
  }
  for (int j = 0; j < kTiles; ++j) {
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * j + 2 * (threadIdx.x % 4) + e;
      float b_column[kDepth];
      for (int k = 0; k < kDepth; ++k) {
        b_column[k] = emulated::operand_element<TB, kTransposeB>(b, column, k);
      }
      for (int h = 0; h < 2; ++h) {
        double sum = accumulate ? d[j][2 * h + e] : 0.;
        for (int k = 0; k < kDepth; ++k) sum += double{rows[h][k]} * b_column[k];
        d[j][2 * h + e] = static_cast<float>(sum);
      }
    }
  }
}

}  // namespace flashinfer::ptx
