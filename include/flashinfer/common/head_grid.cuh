// Launch shape of kernels over [tokens, heads, units of a head]: no thread divides an index.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda_runtime_api.h>

#include <cstdint>
#include <flashinfer/common/math.cuh>

namespace flashinfer {

// threadIdx.x runs over the units of a head (and strides, where a head has more than the CTA has
// threads), y over heads, z over tokens; blockIdx.x over tokens, y over heads. Heads that need
// several CTAs are shared out evenly.
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

}  // namespace flashinfer
#endif  // __CUDACC_RTC__
