// Finds the k-th largest of the keys that a CTA holds in registers. It uses histograms of integers,
// so the result does not depend on the order of the keys.
#pragma once

#include <cstdint>

namespace flashinfer {

// Range of keys that may contain the wanted key.
struct KeyInterval {
  uint32_t low, high;
  uint32_t above;   // keys larger than `high`
  uint32_t inside;  // keys in the range
};

// A key, the number of larger keys and the number of equal ones.
struct SelectedKey {
  uint32_t key, larger, equal;
};

struct BlockSelectStorage {
  static constexpr uint32_t kThreads = 512;
  static constexpr uint32_t kNumBins = 1024;
  static constexpr uint32_t kMaxRanked = 128;

  uint32_t bins[kNumBins];
  uint32_t warp_counts[kThreads / 32];
  uint32_t ranked[kMaxRanked];
  uint32_t num_ranked;
  SelectedKey selected;
  KeyInterval range;
};

namespace detail {

// Largest x, or smallest if kMin, of 512 threads. `warp_values` is read until the next barrier.
template <bool kMin>
__device__ __forceinline__ uint32_t block_extreme(uint32_t x, uint32_t* warp_values) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, x, offset);
    x = kMin ? min(x, other) : max(x, other);
  }
  if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (uint32_t w = 0; w < BlockSelectStorage::kThreads / 32; ++w) {
    x = kMin ? min(x, warp_values[w]) : max(x, warp_values[w]);
  }
  return x;
}

// Sum over this thread and the threads before it. 512 threads; `warp_counts` is read until the next
// barrier.
__device__ __forceinline__ uint32_t block_inclusive_sum(uint32_t x, uint32_t* warp_counts) {
  constexpr uint32_t kWarps = BlockSelectStorage::kThreads / 32;
  const uint32_t lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
#pragma unroll
  for (uint32_t offset = 1; offset < 32; offset *= 2) {
    const uint32_t before = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane_idx >= offset) x += before;
  }
  if (lane_idx == 31) warp_counts[warp_idx] = x;
  __syncthreads();
#pragma unroll
  for (uint32_t w = 0; w < kWarps - 1; ++w) x += w < warp_idx ? warp_counts[w] : 0;
  return x;
}

// Cuts the range into 1024 parts and returns the one that holds the `target`-th largest key.
template <int N>
__device__ __forceinline__ KeyInterval narrow(BlockSelectStorage& storage,
                                              const uint32_t (&keys)[N], const KeyInterval& range,
                                              uint32_t target) {
  const uint32_t low = range.low, high = range.high;
  const int range_bits = 32 - __clz(static_cast<int>(high - low));
  const uint32_t shift = range_bits > 10 ? range_bits - 10 : 0;
  for (uint32_t i = threadIdx.x; i < BlockSelectStorage::kNumBins; i += blockDim.x) {
    storage.bins[i] = 0;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (keys[i] - low <= high - low) atomicAdd(&storage.bins[(high - keys[i]) >> shift], 1u);
  }
  __syncthreads();
  const uint32_t first = storage.bins[2 * threadIdx.x], second = storage.bins[2 * threadIdx.x + 1];
  const uint32_t inclusive = range.above + block_inclusive_sum(first + second, storage.warp_counts);
  const uint32_t before = inclusive - first - second;
  if (before < target && inclusive >= target) {
    const bool in_second = before + first < target;
    const uint32_t top = high - ((2 * threadIdx.x + in_second) << shift);
    const uint32_t width = (1u << shift) - 1;
    storage.range = {top - low > width ? top - width : low, top, before + (in_second ? first : 0),
                     in_second ? second : first};
  }
  __syncthreads();
  return storage.range;
}

// The `target`-th largest key, which must lie in the range; each of 512 threads holds N keys.
template <int N>
__device__ __forceinline__ SelectedKey select_key(BlockSelectStorage& storage,
                                                  const uint32_t (&keys)[N], KeyInterval range,
                                                  uint32_t target) {
#pragma unroll 1
  while (range.low < range.high && range.inside > BlockSelectStorage::kMaxRanked) {
    range = narrow(storage, keys, range, target);
  }
  if (range.low >= range.high) return {range.low, range.above, range.inside};
  if (threadIdx.x == 0) storage.num_ranked = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (keys[i] - range.low <= range.high - range.low) {
      storage.ranked[atomicAdd(&storage.num_ranked, 1u)] = keys[i];
    }
  }
  __syncthreads();
  if (threadIdx.x < range.inside) {
    const uint32_t key = storage.ranked[threadIdx.x];
    uint32_t larger = range.above, equal = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < range.inside; ++i) {
      larger += storage.ranked[i] > key;
      equal += storage.ranked[i] == key;
    }
    // All threads with an equal key write the same value.
    if (larger < target && larger + equal >= target) storage.selected = {key, larger, equal};
  }
  __syncthreads();
  return storage.selected;
}

}  // namespace detail

}  // namespace flashinfer
