// Finds the largest threshold that keeps enough of a row: the k-th largest value, or the smallest
// value of the nucleus.
//
//   T = max { t : sum over { x >= t } of measure(x) >= target },   measure = 1 (top-k) or the
//   weight (top-p)
//
// Equal values are all in or all out, so the kept set { x >= T } does not depend on the order of
// the row.
//
// The keys between two bounds are cut into kNumBins equal ranges. One walk sums the measure of
// each, and the cluster finds the range where the target is crossed. Few elements in it are ranked
// directly; otherwise the range is cut again. 32-bit keys are resolved after at most four rounds.
// Every sum is an integer, hence exact.
#pragma once

#include <flashinfer/sampling/row/cluster.cuh>

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
  static constexpr uint32_t kBinBits = 8;
  static constexpr uint32_t kNumBins = 1u << kBinBits;
  static constexpr uint32_t kNumGroups = 8;
  static constexpr uint32_t kBinsPerGroup = kNumBins / kNumGroups;  // bins of a warp
  static constexpr uint32_t kMaxRanks = 8;
  static constexpr uint32_t kMaxLocal = 48;        // candidates that a CTA may contribute
  static constexpr uint32_t kMaxCandidates = 256;  // candidates that are ranked, by all pairs

  // Shared memory has no 64-bit atomic addition, so a bin's sum is collected in three words, which
  // take 15 bits of each element.
  static constexpr uint32_t kPartBits = 15;
  static constexpr uint32_t kMaxInParts =
      1u << (32 - kPartBits);    // so many elements cannot overflow a word
  using Queues = float[16][64];  // one per warp, for walk_between

  union {
    uint64_t bins[kNumBins];
    uint64_t candidate_measures[kMaxCandidates];  // used when the bins are not
  };
  // Each walk keeps its queues where nothing else is alive.
  union {
    struct {
      uint32_t parts[3][kNumBins];
      uint32_t candidate_keys[kMaxCandidates];
    };
    Queues candidate_queues;
  };
  union {
    struct {
      union {
        // Bins of the group where the target is crossed.
        uint64_t group_bins[kMaxRanks][kBinsPerGroup];
        uint32_t local_keys[kMaxLocal];  // this CTA's candidates
      };
      uint32_t pushed_keys[kMaxRanks][kMaxLocal];  // written by all ranks
    };
    Queues bin_queues;
  };
  uint32_t num_local;
  uint32_t best_key;
  uint32_t crossing_bin;
  uint64_t above;
};

namespace detail {

// Adds to a bin without a limit on the number of additions; it has to wait for the result of an
// atomic.
__device__ __forceinline__ void add_with_carry(uint64_t* bin, uint64_t x) {
  auto* words = reinterpret_cast<uint32_t*>(bin);
  const uint32_t low = static_cast<uint32_t>(x);
  const uint32_t old = atomicAdd(words, low);
  const uint32_t high = static_cast<uint32_t>(x >> 32) + (old + low < old);
  if (high) atomicAdd(words + 1, high);
}

__device__ __forceinline__ void add_in_parts(SelectStorage& storage, uint32_t bin, uint64_t x) {
  constexpr uint32_t kMask = (1u << SelectStorage::kPartBits) - 1;
#pragma unroll
  for (uint32_t part = 0; part < 3; ++part) {
    const uint32_t bits = static_cast<uint32_t>(x >> (part * SelectStorage::kPartBits));
    atomicAdd(&storage.parts[part][bin], part < 2 ? bits & kMask : bits);
  }
}

// Index of the first of 32 lanes, in order, where the sum, starting from `above`, reaches the
// target; 31 if none does. `above` becomes the sum before that lane.
__device__ __forceinline__ uint32_t find_crossing(uint64_t value, uint64_t target,
                                                  uint64_t* above) {
  const uint64_t inclusive = *above + warp_inclusive_sum(value);
  const uint32_t reached = __ballot_sync(0xffffffffu, inclusive >= target);
  const int lane = reached ? __ffs(static_cast<int>(reached)) - 1 : 31;
  *above = __shfl_sync(0xffffffffu, inclusive - value, lane);
  return static_cast<uint32_t>(lane);
}

// Sums the measure of [low, high] per bin, the highest keys first, and finds the bin where the
// target is crossed. All threads return it; storage.above receives the sum before it.
template <typename Row, typename Measure>
__device__ __forceinline__ uint32_t crossing_bin(Row& row, SelectStorage& storage,
                                                 const Measure& measure, uint32_t low,
                                                 uint32_t high, uint32_t shift, uint64_t target,
                                                 uint64_t above) {
  constexpr uint32_t kNumBins = SelectStorage::kNumBins;
  constexpr uint32_t kNumGroups = SelectStorage::kNumGroups;
  constexpr uint32_t kBinsPerGroup = SelectStorage::kBinsPerGroup;
  for (uint32_t i = threadIdx.x; i < kNumBins; i += blockDim.x) {
    storage.bins[i] = 0;
    storage.parts[0][i] = storage.parts[1][i] = storage.parts[2][i] = 0;
  }
  __syncthreads();
  const bool in_parts = row.elements_per_cta() <= SelectStorage::kMaxInParts;
  const float least = key_to_float(low), most = key_to_float(high);
  // The keys make the final decision, since they distinguish values next to 0.
  row.walk_between(least, most, storage.bin_queues[row.warp_idx], [&](float x) {
    const uint32_t key = float_to_key(x);
    if (key - low > high - low) return;
    const uint32_t bin = (high - key) >> shift;
    if constexpr (Measure::kIsCount) {
      atomicAdd(&storage.parts[0][bin], 1u);
    } else if (in_parts) {
      add_in_parts(storage, bin, measure(x));
    } else {
      add_with_carry(&storage.bins[bin], measure(x));
    }
  });
  __syncthreads();

  uint64_t* list = row.next_list();
  for (uint32_t group = row.warp_idx; group < kNumGroups; group += row.num_warps) {
    const uint32_t bin = group * kBinsPerGroup + row.lane_idx;
    const uint64_t sum = storage.bins[bin] + storage.parts[0][bin] +
                         (uint64_t{storage.parts[1][bin]} << SelectStorage::kPartBits) +
                         (uint64_t{storage.parts[2][bin]} << 2 * SelectStorage::kPartBits);
    storage.bins[bin] = sum;
    row.publish(list, row.rank * kNumGroups + group, warp_sum_u64(sum));
  }
  row.barrier();

  // Every warp finds the group; then it fetches the group's bins from all ranks side by side.
  uint64_t sum = 0;
  if (row.lane_idx < kNumGroups) {
    for (uint32_t r = 0; r < row.num_ranks; ++r) sum += list[r * kNumGroups + row.lane_idx];
  }
  const uint32_t group = min(find_crossing(sum, target, &above), kNumGroups - 1);
  for (uint32_t r = row.warp_idx; r < row.num_ranks; r += row.num_warps) {
    const uint64_t* bin = &storage.bins[group * kBinsPerGroup + row.lane_idx];
    storage.group_bins[r][row.lane_idx] =
        Row::kCluster ? ptx::cluster_load_u64(ptx::cluster_address(bin, r)) : *bin;
  }
  __syncthreads();
  if (row.warp_idx == 0) {
    uint64_t bin_sum = 0;
    for (uint32_t r = 0; r < row.num_ranks; ++r) bin_sum += storage.group_bins[r][row.lane_idx];
    const uint32_t lane = find_crossing(bin_sum, target, &above);
    if (row.lane_idx == 0) {
      storage.crossing_bin = group * kBinsPerGroup + lane;
      storage.above = above;
      storage.num_local = 0;
    }
  }
  __syncthreads();
  return storage.crossing_bin;
}

// Collects the elements of [low, high] from the whole cluster in every CTA; false if there are too
// many.
template <typename Row, typename Measure>
__device__ __forceinline__ bool collect_candidates(Row& row, SelectStorage& storage,
                                                   const Measure& measure, uint32_t low,
                                                   uint32_t high, uint32_t* num_candidates) {
  constexpr uint32_t kMaxLocal = SelectStorage::kMaxLocal;
  const float least = key_to_float(low), most = key_to_float(high);
  row.walk_between(least, most, storage.candidate_queues[row.warp_idx], [&](float x) {
    const uint32_t key = float_to_key(x);
    if (key - low > high - low) return;
    const uint32_t slot = atomicAdd(&storage.num_local, 1u);
    if (slot < kMaxLocal) storage.local_keys[slot] = key;
  });
  __syncthreads();
  uint64_t* list = row.next_list();
  const uint32_t num_local = storage.num_local;
  if (row.warp_idx == 0) row.publish(list, row.rank, num_local);
  for (uint32_t i = threadIdx.x; i < kMaxLocal * row.num_ranks; i += blockDim.x) {
    const uint32_t slot = i % kMaxLocal;
    if (slot < num_local) {
      ptx::cluster_store(ptx::cluster_address(&storage.pushed_keys[row.rank][slot], i / kMaxLocal),
                         storage.local_keys[slot]);
    }
  }
  row.barrier();
  const uint32_t count =
      row.lane_idx < row.num_ranks ? static_cast<uint32_t>(list[row.lane_idx]) : 0;
  const uint32_t inclusive = static_cast<uint32_t>(warp_inclusive_sum(count));
  const uint32_t total = __shfl_sync(0xffffffffu, inclusive, 31);
  if (__any_sync(0xffffffffu, count > kMaxLocal) || total > SelectStorage::kMaxCandidates) {
    return false;
  }
  for (uint32_t r = row.warp_idx; r < row.num_ranks; r += row.num_warps) {
    const uint32_t length = __shfl_sync(0xffffffffu, count, r);
    const uint32_t offset = __shfl_sync(0xffffffffu, inclusive, r) - length;
    for (uint32_t i = row.lane_idx; i < length; i += 32) {
      const uint32_t key = storage.pushed_keys[r][i];
      storage.candidate_keys[offset + i] = key;
      storage.candidate_measures[offset + i] = measure(key_to_float(key));
    }
  }
  if (threadIdx.x == 0) storage.best_key = low;
  __syncthreads();
  *num_candidates = total;
  return true;
}

// The largest candidate for which the sum of all candidates from it upwards reaches the target.
__device__ __forceinline__ uint32_t rank_candidates(SelectStorage& storage, uint32_t count,
                                                    uint64_t target, uint64_t above) {
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
    const uint32_t key = storage.candidate_keys[i];
    uint64_t sum = above;
#pragma unroll 4
    for (uint32_t j = 0; j < count; ++j) {
      sum += storage.candidate_keys[j] >= key ? storage.candidate_measures[j] : 0;
    }
    if (sum >= target) atomicMax(&storage.best_key, key);
  }
  __syncthreads();
  return storage.best_key;
}

}  // namespace detail

// Key of the threshold, which must lie in [low, high]: no element is larger than `high`, and the
// elements that are at least `low` reach the target. All threads of the cluster call it and get the
// result. Another cluster barrier must follow before the next call or the end of the kernel.
template <typename Row, typename Measure>
__device__ __forceinline__ uint32_t select_threshold(Row& row, SelectStorage& storage,
                                                     const Measure& measure, uint32_t low,
                                                     uint32_t high, uint64_t target) {
  uint64_t above = 0;
#pragma unroll 1
  while (low < high) {
    const int range_bits = 32 - __clz(static_cast<int>(high - low));
    const uint32_t shift = range_bits > static_cast<int>(SelectStorage::kBinBits)
                               ? range_bits - SelectStorage::kBinBits
                               : 0;
    const uint32_t bin =
        detail::crossing_bin(row, storage, measure, low, high, shift, target, above);
    above = storage.above;
    high -= bin << shift;
    const uint32_t width = (1u << shift) - 1;
    low = high - low > width ? high - width : low;
    if (shift == 0) return low;
    uint32_t num_candidates;
    if (detail::collect_candidates(row, storage, measure, low, high, &num_candidates)) {
      return detail::rank_candidates(storage, num_candidates, target, above);
    }
  }
  return low;
}

}  // namespace flashinfer
