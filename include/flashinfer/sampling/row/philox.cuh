// Philox4x32-10, a counter-based generator: the same (key, counter) gives the same bits on every
// device, so a draw depends on nothing but the seed, the offset and the stream it is made for. J.
// Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
#pragma once

#include <cstdint>

namespace flashinfer {

// 64 random bits. `seed` is the key; `offset`, `stream` (a row) and `draw` (number within the row)
// are the counter.
__device__ __forceinline__ uint64_t philox_bits(uint64_t seed, uint64_t offset, uint32_t stream,
                                                uint32_t draw) {
  uint32_t c0 = static_cast<uint32_t>(offset), c1 = static_cast<uint32_t>(offset >> 32);
  uint32_t c2 = stream, c3 = draw;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll 1
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * 0xd2511f53u;
    const uint64_t p1 = static_cast<uint64_t>(c2) * 0xcd9e8d57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return static_cast<uint64_t>(c1) << 32 | c0;
}

}  // namespace flashinfer
