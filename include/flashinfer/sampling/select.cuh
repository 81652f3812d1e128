// The largest threshold above which a row has enough: the k-th largest value, or the nucleus' smallest one.
//
//   T = max { t : sum over { x >= t } of measure(x) >= target },   measure = 1 (top-k) or the weight (top-p)
//
// Equal values are all in or all out, so the kept set { x >= T } does not depend on the order of the row.
//
// The keys between two bounds are cut into kNumBins equal ranges; one walk sums the measure of each, and the cluster
// finds the range where the target is crossed. When few elements are in it they are ranked directly, else the range is
// cut again: 32-bit keys are resolved after at most four rounds. Everything is an integer sum, hence exact.
#pragma once

#include <flashinfer/sampling/row_cluster.cuh>

namespace flashinfer {

struct CountMeasure {
  static constexpr bool kIsCount = true;
  __device__ __forceinline__ uint64_t operator()(float) const { return 1; }
};

template <typename Weight>
struct WeightMeasure {
  static constexpr bool kIsCount = false;
  const Weight& weight;
  __device__ __forceinline__ uint64_t operator()(float x) const { return weight(x); }
};

struct SelectStorage {
  static constexpr uint32_t kNumBins = 1024;
  static constexpr uint32_t kNumGroups = 16;
  static constexpr uint32_t kBinsPerGroup = kNumBins / kNumGroups;
  static constexpr uint32_t kMaxLocal = 128;       // candidates that a CTA may contribute
  static constexpr uint32_t kMaxCandidates = 256;  // that are ranked, by all pairs

  union {
    uint2 bins[kNumBins];  // low and high word of the sum
    struct {
      uint64_t measures[kMaxCandidates];
      uint32_t keys[kMaxCandidates];
    } candidates;  // of all ranks; in use when no bin is
  };
  uint32_t local_keys[kMaxLocal];
  uint32_t num_local;
  uint32_t num_candidates;
  uint32_t best_key;
  uint32_t crossing_bin;
  uint64_t above;
};

namespace detail {

// Adds to a 64-bit sum kept as two words; shared memory has no 64-bit atomic addition.
__device__ __forceinline__ void add_to_bin(uint2* bin, uint64_t x) {
  const uint32_t low = static_cast<uint32_t>(x);
  const uint32_t old = atomicAdd(&bin->x, low);
  const uint32_t high = static_cast<uint32_t>(x >> 32) + (old + low < old);
  if (high) atomicAdd(&bin->y, high);
}

// Index of the first of 32 lanes, in order, where the sum from `above` on reaches the target, 31 if none; `above` becomes
// the sum before it.
__device__ __forceinline__ uint32_t find_crossing(uint64_t value, uint64_t target, uint64_t* above) {
  const uint64_t inclusive = *above + warp_inclusive_sum(value);
  const uint32_t reached = __ballot_sync(0xffffffffu, inclusive >= target);
  const int lane = reached ? __ffs(static_cast<int>(reached)) - 1 : 31;
  *above = __shfl_sync(0xffffffffu, inclusive - value, lane);
  return static_cast<uint32_t>(lane);
}

// Sums the measure of [low, high] by bins, the highest keys first, and finds the bin where the target is crossed. All
// threads return it; storage.above has the sum before it.
template <typename Row, typename Measure>
__device__ __forceinline__ uint32_t crossing_bin(Row& row, SelectStorage& storage,
                                                 const Measure& measure, uint32_t low,
                                                 uint32_t high, uint32_t shift, uint64_t target,
                                                 uint64_t above) {
  constexpr uint32_t kNumBins = SelectStorage::kNumBins;
  constexpr uint32_t kNumGroups = SelectStorage::kNumGroups;
  constexpr uint32_t kBinsPerGroup = SelectStorage::kBinsPerGroup;
  for (uint32_t i = threadIdx.x; i < kNumBins; i += blockDim.x) storage.bins[i] = {0, 0};
  __syncthreads();
  row.walk([&](float x) {
    const uint32_t key = float_to_key(x);
    if (key - low > high - low) return;
    uint2* bin = &storage.bins[(high - key) >> shift];
    if constexpr (Measure::kIsCount) {
      atomicAdd(&bin->x, 1u);
    } else {
      add_to_bin(bin, measure(x));
    }
  });
  __syncthreads();

  const auto local_bins = reinterpret_cast<const uint64_t*>(storage.bins);
  uint64_t* list = row.next_list();
  for (uint32_t group = row.warp_idx; group < kNumGroups; group += row.num_warps) {
    const uint64_t* first = local_bins + group * kBinsPerGroup;
    const uint64_t sum = warp_sum_u64(first[row.lane_idx] + first[row.lane_idx + 32]);
    row.publish(list, row.rank * kNumGroups + group, sum);
  }
  row.barrier();

  if (row.warp_idx == 0) {
    uint64_t sum = 0;
    if (row.lane_idx < kNumGroups) {
      for (uint32_t r = 0; r < row.num_ranks; ++r) sum += list[r * kNumGroups + row.lane_idx];
    }
    const uint32_t group = min(find_crossing(sum, target, &above), kNumGroups - 1);
    // A lane takes two neighbouring bins.
    const uint32_t bin = group * kBinsPerGroup + 2 * row.lane_idx;
    uint64_t first = 0, second = 0;
    for (uint32_t r = 0; r < row.num_ranks; ++r) {
      const uint32_t address = ptx::cluster_address(local_bins + bin, r);
      first += ptx::cluster_load_u64(address);
      second += ptx::cluster_load_u64(address + 8);
    }
    const uint32_t lane = find_crossing(first + second, target, &above);
    first = __shfl_sync(0xffffffffu, first, lane);
    const bool in_second = above + first < target;
    if (row.lane_idx == 0) {
      storage.crossing_bin = group * kBinsPerGroup + 2 * lane + in_second;
      storage.above = above + (in_second ? first : 0);
      storage.num_local = 0;
    }
  }
  __syncthreads();
  return storage.crossing_bin;
}

// Collects the elements of [low, high] from the whole cluster; false if they are too many.
template <typename Row, typename Measure>
__device__ __forceinline__ bool collect_candidates(Row& row, SelectStorage& storage,
                                                   const Measure& measure, uint32_t low,
                                                   uint32_t high) {
  constexpr uint32_t kMaxLocal = SelectStorage::kMaxLocal;
  row.walk([&](float x) {
    const uint32_t key = float_to_key(x);
    if (key - low > high - low) return;
    const uint32_t slot = atomicAdd(&storage.num_local, 1u);
    if (slot < kMaxLocal) storage.local_keys[slot] = key;
  });
  row.barrier();
  // Every CTA takes the lists of all, so that none has to wait for a result.
  uint32_t count = 0;
  if (row.lane_idx < row.num_ranks) {
    count = ptx::cluster_load_u32(ptx::cluster_address(&storage.num_local, row.lane_idx));
  }
  const uint32_t inclusive = static_cast<uint32_t>(warp_inclusive_sum(count));
  const uint32_t total = __shfl_sync(0xffffffffu, inclusive, 31);
  const bool fits = !__any_sync(0xffffffffu, count > kMaxLocal) &&
                    total <= SelectStorage::kMaxCandidates;
  if (!fits) return false;
  for (uint32_t r = row.warp_idx; r < row.num_ranks; r += row.num_warps) {
    const uint32_t length = __shfl_sync(0xffffffffu, count, r);
    const uint32_t offset = __shfl_sync(0xffffffffu, inclusive, r) - length;
    for (uint32_t i = row.lane_idx; i < length; i += 32) {
      const uint32_t key =
          ptx::cluster_load_u32(ptx::cluster_address(&storage.local_keys[i], r));
      storage.candidates.keys[offset + i] = key;
      storage.candidates.measures[offset + i] = measure(key_to_float(key));
    }
  }
  if (threadIdx.x == 0) {
    storage.num_candidates = total;
    storage.best_key = low;
  }
  __syncthreads();
  return true;
}

// The largest candidate from which on the sum reaches the target.
__device__ __forceinline__ uint32_t rank_candidates(SelectStorage& storage, uint64_t target,
                                                    uint64_t above) {
  const uint32_t count = storage.num_candidates;
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    const uint32_t key = storage.candidates.keys[i];
    uint64_t sum = above;
    for (uint32_t j = 0; j < count; ++j) {
      if (storage.candidates.keys[j] >= key) sum += storage.candidates.measures[j];
    }
    if (sum >= target) atomicMax(&storage.best_key, key);
  }
  __syncthreads();
  return storage.best_key;
}

}  // namespace detail

// Key of the threshold, which must lie in [low, high]: nothing is larger than `high`, and the elements from `low` on
// reach the target. All threads of the cluster call and get it. Another barrier of the cluster must follow before the
// next call or the end of the kernel.
template <typename Row, typename Measure>
__device__ __forceinline__ uint32_t select_threshold(Row& row, SelectStorage& storage,
                                                     const Measure& measure, uint32_t low,
                                                     uint32_t high, uint64_t target) {
  uint64_t above = 0;
#pragma unroll 1
  while (low < high) {
    const int range_bits = 32 - __clz(static_cast<int>(high - low));
    const uint32_t shift = range_bits > 10 ? range_bits - 10 : 0;
    const uint32_t bin =
        detail::crossing_bin(row, storage, measure, low, high, shift, target, above);
    above = storage.above;
    high -= bin << shift;
    const uint32_t width = (1u << shift) - 1;
    low = high - low > width ? high - width : low;
    if (shift == 0) return low;
    if (detail::collect_candidates(row, storage, measure, low, high)) {
      return detail::rank_candidates(storage, target, above);
    }
  }
  return low;
}

}  // namespace flashinfer
