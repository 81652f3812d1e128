// In place of the product's header.
#pragma once

namespace flashinfer {

template <uint32_t kMask>
inline uint32_t select_bits(uint32_t a, uint32_t b) {
  return (a & kMask) | (b & ~kMask);
}

}  // namespace flashinfer
