// Launch shape of kernels over [tokens, heads, units of a head], in which no thread divides an
// index.
//
// Measurements, also of what lost: docs/tuning/memory.md.
#pragma once

#include <cstdint>

namespace flashinfer {

// The CTA's index along the tokens in a grid of `heads_first`; blockIdx.x is its index along heads.
__device__ __forceinline__ uint32_t heads_first_token_block() {
  return blockIdx.z * gridDim.y + blockIdx.y;
}

}  // namespace flashinfer

#ifndef __CUDACC_RTC__
#include <cuda_runtime_api.h>

#include <flashinfer/common/math.cuh>

namespace flashinfer {

// threadIdx.x runs over the units of a head (in strides, if a head has more units than the CTA has
// threads), y over heads, z over tokens; blockIdx.x runs over tokens, y over heads. Heads that need
// several CTAs are divided evenly.
struct HeadGrid {
  dim3 grid;
  dim3 block;
};

inline HeadGrid make_head_grid(uint32_t num_tokens, uint32_t num_heads, uint32_t num_units,
                               uint32_t threads) {
  constexpr uint32_t kMaxZ = 64;
  const uint32_t x = num_units < 1 ? 1 : num_units < threads ? num_units : threads;
  const uint32_t grid_y = ceil_div(num_heads, threads / x);
  const uint32_t y = ceil_div(num_heads, grid_y);
  const uint32_t z = threads / (x * y) < kMaxZ ? threads / (x * y) : kMaxZ;
  return {dim3(ceil_div(num_tokens, z), grid_y), dim3(x, y, z)};
}

// The same CTAs in the order of memory: heads vary fastest. This is faster for concatenation and
// for merging two states, and slower for merging many.
inline HeadGrid heads_first(const HeadGrid& shape) {
  constexpr uint32_t kMaxY = 65535;
  const uint32_t token_blocks = shape.grid.x;
  const uint32_t y = token_blocks < kMaxY ? token_blocks : kMaxY;
  return {dim3(shape.grid.y, y, ceil_div(token_blocks, y)), shape.block};
}

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
