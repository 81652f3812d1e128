// In place of the product's header, which says what lane holds what.
#pragma once

#include <flashinfer/common/dtype.cuh>

namespace flashinfer::ptx {

template <typename T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Fragments {
    uint32_t a[4], b[2];
  };
  const Fragments* lanes = emulation::block.exchange(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const auto element = [](uint32_t pair, int i) {
    return to_float(T{static_cast<uint16_t>(pair >> (16 * i))});
  };
  for (int i = 0; i < 4; ++i) {
    const int lower_rows = i / 2, column = 2 * quad + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int upper_k = k / 8, lane = k % 8 / 2;
      const float x = element(lanes[4 * group + lane].a[2 * upper_k + lower_rows], k % 2);
      const float y = element(lanes[4 * column + lane].b[upper_k], k % 2);
      sum += static_cast<double>(x) * y;
    }
    d[i] += static_cast<float>(sum);
  }
}

}  // namespace flashinfer::ptx
