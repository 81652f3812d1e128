// Converts bfloat16 queries to float16 where the keys have 8 bits. Float16 represents every 8-bit
// value, and widening keys to it takes a quarter of the instructions that bfloat16 needs. Each row
// is multiplied by a power of two that moves its largest element to [2^14, 2^15), as in the
// portable kernel (load_query). Elements down to 2^-31 of the largest stay exact; the error of
// smaller ones is at most 2^-39 of the largest.
//
// Measurements, also of what lost: docs/tuning/attention_sm90_kv8.md.
#pragma once

#include <flashinfer/attention/sm90/tile.cuh>
#include <flashinfer/ptx/ldmatrix.cuh>
#include <flashinfer/ptx/tma.cuh>

namespace flashinfer {

// Keeps the larger magnitude in each half. Bits of bfloat16 without the sign order like integers.
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t largest, uint32_t pair) {
  return __vmaxu2(largest, pair & 0x7fff7fffu);
}

__device__ __forceinline__ uint32_t scaled_to_float16(uint32_t pair, float scale) {
  return PackedPair<dtype::float16>::pack(__uint_as_float(pair << 16) * scale,
                                          __uint_as_float(pair & 0xffff0000u) * scale);
}

// Converts the warp's 16 rows at `rows` in shared memory in place. `inverse_scale` receives the
// factors of the logits of the lane's two rows (lane / 4 and lane / 4 + 8). The tensor cores may
// read the rows after a barrier of the warpgroup.
template <typename Tile>
__device__ __forceinline__ void make_query_float16(uint32_t rows, float (&inverse_scale)[2]) {
  constexpr int kSteps = Tile::kHeadDimQK / 16;
  const int lane_idx = threadIdx.x % 32;
  const uint32_t first = rows + swizzled_offset<Tile::kTileQ>(lane_idx % 16, lane_idx / 16);
  const auto address = [&](int step) {
    return (first ^ step % 4 * 32) + step / 4 * Tile::kTileQ * 128;
  };
  uint32_t pairs[kSteps][4], magnitudes[2] = {0, 0};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::ldmatrix_x4(pairs[step], address(step));
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      magnitudes[r % 2] = larger_magnitudes(magnitudes[r % 2], pairs[step][r]);
    }
  }
  float scale[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t largest = max(magnitudes[h] >> 16, magnitudes[h] & 0xffffu);
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    // Biased float exponents, at most 253, so that the inverse is normal, too.
    const uint32_t exponent = min(127u + 127u + 14u - (largest >> 7), 253u);
    scale[h] = __uint_as_float(exponent << 23);
    inverse_scale[h] = __uint_as_float((254u - exponent) << 23);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < 4; ++r) pairs[step][r] = scaled_to_float16(pairs[step][r], scale[r % 2]);
    ptx::stmatrix_x4(address(step), pairs[step]);
  }
  ptx::async_proxy_fence();
}

}  // namespace flashinfer
