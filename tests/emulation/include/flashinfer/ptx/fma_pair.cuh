// In place of the product's header, which says what the instruction does.
#pragma once

#include <flashinfer/common/dtype.cuh>

namespace flashinfer::ptx {

template <typename T>
inline uint32_t fma_pair(uint32_t a, uint32_t factor, uint32_t addend) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto element = [shift](uint32_t pair) {
      return to_float(T{static_cast<uint16_t>(pair >> shift)});
    };
    const float sum = std::fma(element(a), element(factor), element(addend));
    const T rounded = from_float<T>(sum);
    uint16_t bits;
    std::memcpy(&bits, &rounded, sizeof(bits));
    result |= static_cast<uint32_t>(bits) << shift;
  }
  return result;
}

inline uint32_t multiply_pair(uint32_t a, uint32_t factors) {
  return fma_pair<dtype::float16>(a, factors, 0x80008000u);
}

template <int kIndex>
inline uint32_t scale_pair(uint32_t a, uint32_t factors) {
  const uint32_t factor = factors >> 16 * kIndex & 0xffffu;
  return multiply_pair(a, factor << 16 | factor);
}

}  // namespace flashinfer::ptx
