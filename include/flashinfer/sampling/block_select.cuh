// The k-th largest of the keys that a CTA holds in registers. Histograms of integers, so the result
// does not depend on the order of the keys.
#pragma once

#include <cstdint>

namespace flashinfer {

// Keys that may be the one looked for.
struct KeyRange {
  uint32_t low, high;
  uint32_t above;   // keys larger than `high`
  uint32_t inside;  // keys in the range
};

struct BlockSelectStorage {
  static constexpr uint32_t kThreads = 512;
  static constexpr uint32_t kNumBins = 1024;
  static constexpr uint32_t kMaxRanked = 128;

  uint32_t bins[kNumBins];
  uint32_t warp_counts[kThreads / 32];
  uint32_t ranked[kMaxRanked];
  uint32_t num_ranked;
  uint32_t best;
  KeyRange range;
};

namespace detail {

// Sum over this thread and those before it; `total` of all. 512 threads, `warp_counts` is read
// until the next barrier. Two numbers may be packed in a word.
__device__ __forceinline__ uint32_t block_inclusive_sum(uint32_t x, uint32_t* warp_counts,
                                                        uint32_t* total) {
  constexpr uint32_t kWarps = BlockSelectStorage::kThreads / 32;
  const uint32_t lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
#pragma unroll
  for (uint32_t offset = 1; offset < 32; offset *= 2) {
    const uint32_t before = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane_idx >= offset) x += before;
  }
  if (lane_idx == 31) warp_counts[warp_idx] = x;
  __syncthreads();
  *total = 0;
#pragma unroll
  for (uint32_t w = 0; w < kWarps; ++w) {
    const uint32_t count = warp_counts[w];
    if (w < warp_idx) x += count;
    *total += count;
  }
  return x;
}

// Least and largest key; keys of 0 do not count.
template <int N>
__device__ __forceinline__ KeyRange key_range(BlockSelectStorage& storage,
                                              const uint32_t (&keys)[N]) {
  uint32_t low = 0xffffffffu, high = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    low = keys[i] != 0 && keys[i] < low ? keys[i] : low;
    high = keys[i] > high ? keys[i] : high;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    low = min(low, __shfl_xor_sync(0xffffffffu, low, offset));
    high = max(high, __shfl_xor_sync(0xffffffffu, high, offset));
  }
  constexpr int kWarps = BlockSelectStorage::kThreads / 32;
  if (threadIdx.x % 32 == 0) {
    storage.warp_counts[threadIdx.x / 32] = low;
    storage.ranked[threadIdx.x / 32] = high;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    low = min(low, storage.warp_counts[w]);
    high = max(high, storage.ranked[w]);
  }
  return {low, high, 0, 0xffffffffu};
}

// Cuts the range into 1024 parts and returns the one that holds the `target`-th largest key.
template <int N>
__device__ __forceinline__ KeyRange narrow(BlockSelectStorage& storage, const uint32_t (&keys)[N],
                                           const KeyRange& range, uint32_t target) {
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
  uint32_t total;
  const uint32_t inclusive =
      range.above + block_inclusive_sum(first + second, storage.warp_counts, &total);
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

// The `target`-th largest key, which must be in the range; N keys of each of 512 threads.
template <int N>
__device__ __forceinline__ uint32_t select_key(BlockSelectStorage& storage,
                                               const uint32_t (&keys)[N], KeyRange range,
                                               uint32_t target) {
#pragma unroll 1
  while (range.low < range.high && range.inside > BlockSelectStorage::kMaxRanked) {
    range = narrow(storage, keys, range, target);
  }
  if (range.low >= range.high) return range.low;
  if (threadIdx.x == 0) storage.num_ranked = storage.best = 0;
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
    uint32_t rank = range.above;
#pragma unroll 4
    for (uint32_t i = 0; i < range.inside; ++i) rank += storage.ranked[i] >= key;
    if (rank >= target) atomicMax(&storage.best, key);
  }
  __syncthreads();
  return storage.best;
}

}  // namespace detail

}  // namespace flashinfer
