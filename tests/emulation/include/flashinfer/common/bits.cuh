// In place of the product's header, which says what the functions do.
#pragma once

#include <cstdint>

namespace flashinfer {

inline uint32_t select_bits(uint32_t x, uint32_t y, uint32_t mask) {
  return (x & mask) | (y & ~mask);
}
inline uint32_t mask_and_flip(uint32_t x, uint32_t mask, uint32_t flips) {
  return (x & mask) ^ flips;
}

}  // namespace flashinfer
