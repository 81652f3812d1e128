// In place of the product's header: products of 8-bit operands in shared memory. A descriptor is
// the operand's address, and a product is there when it is asked for; others are not emulated.
#pragma once

#include <flashinfer/common/dtype.cuh>

namespace flashinfer::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
inline void wgmma_wait() {}
template <int kTiles>
inline void wgmma_done(float (&)[kTiles][4]) {}

inline uint64_t wgmma_operand(uint32_t address) { return address; }
inline uint64_t wgmma_advance(uint64_t operand, uint32_t bytes) { return operand + bytes; }

template <typename T, bool kTransposeB, int kTiles>
inline void wgmma(float (&d)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
  const auto element = [](uint64_t operand, int row, int k) {
    const uint64_t rows = operand / 1024 * 1024, chunk = operand % 128 / 16 + k / 16;
    const uint8_t bits = dynamic_shared[rows + row * 128 + (chunk ^ row % 8) * 16 + k % 16];
    return to_float(T{bits});
  };
  const int first = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  for (int j = 0; j < kTiles; ++j) {
    for (int i = 0; i < 4; ++i) {
      const int row = first + i / 2 * 8, column = 8 * j + 2 * (threadIdx.x % 4) + i % 2;
      double sum = accumulate ? d[j][i] : 0.;
      for (int k = 0; k < 32; ++k) sum += element(a, row, k) * element(b, column, k);
      d[j][i] = static_cast<float>(sum);
    }
  }
}

}  // namespace flashinfer::ptx
