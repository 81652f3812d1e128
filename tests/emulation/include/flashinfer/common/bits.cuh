// In place of the product's header, which says what the functions do.
#pragma once

#include <cstdint>

namespace flashinfer {

inline uint32_t select_bits(uint32_t x, uint32_t y, uint32_t mask) {
  return (x & mask) | (y & ~mask);
}
inline uint32_t flip_and_mask(uint32_t x, uint32_t flips, uint32_t mask) {
  return (x ^ flips) & mask;
}
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  return emulation::permute_bytes(a, b, selector);
}

}  // namespace flashinfer
