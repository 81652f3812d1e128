// Philox4x32, a counter-based generator: the same (key, counter) gives the same bits on every
// device, so a draw depends on nothing but the seed, the offset and the stream it is made for. J.
// Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
#pragma once

#include <cstdint>

namespace flashinfer {

// 128 random bits: the counter after `rounds` rounds (10 in the paper; fewer are faster and worse).
__device__ __forceinline__ uint4 philox4x32(uint64_t seed, uint4 counter, int rounds = 10) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(counter.x) * 0xd2511f53u;
    const uint64_t p1 = static_cast<uint64_t>(counter.z) * 0xcd9e8d57u;
    counter.x = static_cast<uint32_t>(p1 >> 32) ^ counter.y ^ key0;
    counter.y = static_cast<uint32_t>(p1);
    counter.z = static_cast<uint32_t>(p0 >> 32) ^ counter.w ^ key1;
    counter.w = static_cast<uint32_t>(p0);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return counter;
}

// 64 random bits. `seed` is the key; `offset`, `stream` (a row) and `draw` (number within the row)
// are the counter.
__device__ __forceinline__ uint64_t philox_bits(uint64_t seed, uint64_t offset, uint32_t stream,
                                                uint32_t draw) {
  const uint4 bits = philox4x32(
      seed, {static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), stream, draw});
  return static_cast<uint64_t>(bits.y) << 32 | bits.x;
}

}  // namespace flashinfer
