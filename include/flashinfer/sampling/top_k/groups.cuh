// Top-k with small k from the maxima of groups of 128 elements: each of the k largest elements lies
// in a group whose maximum reaches the k-th largest maximum. These groups are read again, and the
// short list of their elements is filtered and drawn from.
#pragma once

#include <flashinfer/sampling/row/tiles.cuh>

namespace flashinfer {

// Shared memory of the finish kernel.
struct FinishStorage {
  static constexpr uint32_t kFinishWarps = 16;
  static constexpr uint32_t kNumBins = 1024;
  static constexpr uint32_t kMaxHot = 512;         // groups that are read again
  static constexpr uint32_t kMaxCandidates = 512;  // elements that are ranked, by all pairs

  union {
    struct {
      uint32_t bins[kNumBins];
      uint32_t hot_groups[kMaxHot];
      uint32_t keys[kMaxCandidates];
      uint32_t indices[kMaxCandidates];
      uint64_t weights[kMaxCandidates];
    };
    SelectStorage select;  // for the search of the whole row
  };
  uint64_t warp_values[2 * kFinishWarps];
  uint32_t warp_counts[kFinishWarps];
  uint32_t num_hot, num_candidates;
  uint32_t crossing, in_crossing, above;
  uint32_t top_k_key, top_p_key;
  uint64_t kept;
};

namespace detail {

// A row's group maxima as keys, held by the CTA: thread t has groups t, t + 512, ...
struct GroupKeys {
  static constexpr int kPerThread = StreamLayout::kMaxGroups / 512;
  uint32_t keys[kPerThread];  // 0 where there is no group

  __device__ __forceinline__ void load(const float* group_max, uint32_t num_groups) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const uint32_t group = threadIdx.x + 512 * i;
      keys[i] = group < num_groups ? float_to_key(group_max[group]) : 0;
    }
  }
};

// A key that at least k of the group keys reach, and few more. It is the lower end of a histogram
// bin, which is cut once more if it holds many keys. storage.bins must be zero on entry and is
// changed.
__device__ __forceinline__ uint32_t group_bound(FinishStorage& storage, const GroupKeys& groups,
                                                uint32_t row_max_key, uint32_t k) {
  const uint32_t lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
  // Each quarter of a warp has a group that reaches the smallest of the quarters' maxima.
  constexpr uint32_t kQuarters = 64;
  uint32_t least = 0xffffffffu, quarter = 0;
#pragma unroll
  for (int i = 0; i < GroupKeys::kPerThread; ++i) {
    least = groups.keys[i] != 0 ? min(least, groups.keys[i]) : least;
    quarter = max(quarter, groups.keys[i]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    least = min(least, __shfl_xor_sync(0xffffffffu, least, offset));
    const uint32_t other = __shfl_xor_sync(0xffffffffu, quarter, offset);
    quarter = offset < 8 ? max(quarter, other) : quarter;
  }
  quarter = min(quarter, __shfl_xor_sync(0xffffffffu, quarter, 8));
  quarter = min(quarter, __shfl_xor_sync(0xffffffffu, quarter, 16));
  if (lane_idx == 0) storage.warp_values[warp_idx] = uint64_t{quarter} << 32 | least;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 16; ++w) {
    least = min(least, static_cast<uint32_t>(storage.warp_values[w]));
    quarter = min(quarter, static_cast<uint32_t>(storage.warp_values[w] >> 32));
  }
  uint32_t low = k <= kQuarters && quarter != 0 ? quarter : least;
  uint32_t high = row_max_key, above = 0;
#pragma unroll 1
  for (int round = 0; low < high; ++round) {
    const int range_bits = 32 - __clz(static_cast<int>(high - low));
    const uint32_t shift = range_bits > 10 ? range_bits - 10 : 0;
#pragma unroll
    for (int i = 0; i < GroupKeys::kPerThread; ++i) {
      const uint32_t key = groups.keys[i];
      if (key - low <= high - low) atomicAdd(&storage.bins[(high - key) >> shift], 1u);
    }
    __syncthreads();
    // Each of 512 threads has two bins.
    const uint32_t first = storage.bins[2 * threadIdx.x],
                   second = storage.bins[2 * threadIdx.x + 1];
    uint32_t inclusive = first + second;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t before = __shfl_up_sync(0xffffffffu, inclusive, offset);
      if (lane_idx >= static_cast<uint32_t>(offset)) inclusive += before;
    }
    if (lane_idx == 31) storage.warp_counts[warp_idx] = inclusive;
    __syncthreads();
    inclusive += above;
#pragma unroll
    for (uint32_t w = 0; w < 15; ++w) inclusive += w < warp_idx ? storage.warp_counts[w] : 0;
    const uint32_t before = inclusive - first - second;
    if (before < k && inclusive >= k) {
      const bool in_second = before + first < k;
      storage.crossing = 2 * threadIdx.x + in_second;
      storage.above = before + (in_second ? first : 0);
      storage.in_crossing = in_second ? second : first;
    }
    __syncthreads();
    above = storage.above;
    high -= storage.crossing << shift;
    const uint32_t width = (1u << shift) - 1;
    low = high - low > width ? high - width : low;
    // Each group beyond the k-th costs one more look.
    if (shift == 0 || round == 1 || above + storage.in_crossing <= k + 32) break;
    for (uint32_t i = threadIdx.x; i < FinishStorage::kNumBins; i += blockDim.x)
      storage.bins[i] = 0;
    __syncthreads();
  }
  return low;
}

// Fills storage.keys, indices and weights with all elements that reach the k-th largest group
// maximum. Returns false if there are too many.
template <typename Traits>
__device__ __forceinline__ bool collect_top_groups(
    const SamplingParams& params, FinishStorage& storage, const typename Traits::T* row,
    const GroupKeys& groups, float row_max, const typename Traits::Weight& weight, uint32_t k) {
  const uint32_t num_groups = ceil_div(params.vocab_size, StreamLayout::kGroupSize);
  if (k > num_groups || k > FinishStorage::kMaxHot / 2) return false;
  const uint32_t bound = group_bound(storage, groups, float_to_key(row_max), k);
#pragma unroll
  for (int i = 0; i < GroupKeys::kPerThread; ++i) {
    if (groups.keys[i] < bound) continue;
    const uint32_t slot = atomicAdd(&storage.num_hot, 1u);
    if (slot < FinishStorage::kMaxHot) storage.hot_groups[slot] = threadIdx.x + 512 * i;
  }
  __syncthreads();
  const uint32_t num_hot = storage.num_hot;
  if (num_hot > FinishStorage::kMaxHot) return false;

  constexpr int kInFlight = 4;
  const uint32_t lane_idx = threadIdx.x % 32, num_warps = blockDim.x / 32;
  const bool aligned = row_is_aligned(row);
  for (uint32_t base = threadIdx.x / 32; base < num_hot; base += num_warps * kInFlight) {
    float x[kInFlight][4];
    uint32_t first[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const uint32_t hot = base + i * num_warps;
      first[i] = hot < num_hot ? storage.hot_groups[hot] * StreamLayout::kGroupSize + 4 * lane_idx
                               : params.vocab_size;
      load_elements(row, aligned, params.vocab_size, first[i], x[i]);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t key = float_to_key(x[i][j]);
        if (key < bound || first[i] + j >= params.vocab_size) continue;
        const uint32_t slot = atomicAdd(&storage.num_candidates, 1u);
        if (slot >= FinishStorage::kMaxCandidates) continue;
        storage.keys[slot] = key;
        storage.indices[slot] = first[i] + j;
        storage.weights[slot] = weight(x[i][j]);
      }
    }
  }
  __syncthreads();
  return storage.num_candidates <= FinishStorage::kMaxCandidates;
}

// Filters the candidates by top-k and top-p and draws one, in index order. `total` is the row's.
template <typename Traits>
__device__ __forceinline__ void draw_from_candidates(const SamplingParams& params,
                                                     FinishStorage& storage, uint32_t k, float p,
                                                     uint64_t total, uint64_t bits,
                                                     uint32_t out_row) {
  // Each candidate gets one thread, or four if there are enough threads.
  const uint32_t count = storage.num_candidates, parts = count <= blockDim.x / 4 ? 4 : 1;
  const uint32_t candidate = threadIdx.x / parts, part = threadIdx.x % parts;
  const auto sum_parts = [&](auto x) {
    if (parts == 4) {
      x += __shfl_xor_sync(0xffffffffu, x, 1);
      x += __shfl_xor_sync(0xffffffffu, x, 2);
    }
    return x;
  };
  const bool mine = candidate < count;
  const uint32_t key = mine ? storage.keys[candidate] : 0;
  uint32_t rank = 0;
  uint64_t from_here = 0;  // sum of the weights of all candidates that are not smaller
  if (mine) {
#pragma unroll 8
    for (uint32_t i = part; i < count; i += parts) {
      const bool counts = storage.keys[i] >= key;
      rank += counts;
      from_here += counts ? storage.weights[i] : 0;
    }
  }
  rank = sum_parts(rank);
  from_here = sum_parts(from_here);
  if (mine && rank >= k) atomicMax(&storage.top_k_key, key);
  __syncthreads();
  uint32_t threshold = storage.top_k_key;
  if (mine && key == threshold) storage.kept = from_here;
  if constexpr (Traits::kTopP) {
    __syncthreads();
    const uint64_t base = Traits::kFilter == SamplingFilter::kTopKTopP ? storage.kept : total;
    const uint64_t target = top_p_target(p, base);
    if (p < 1.f && mine && key >= threshold && from_here >= target)
      atomicMax(&storage.top_p_key, key);
    __syncthreads();
    threshold = threshold > storage.top_p_key ? threshold : storage.top_p_key;
    if (mine && key == threshold) storage.kept = from_here;
  }
  __syncthreads();
  const uint64_t target = __umul64hi(bits, storage.kept);
  const uint32_t index = mine ? storage.indices[candidate] : 0;
  uint64_t before = 0;
  if (mine && key >= threshold) {
#pragma unroll 8
    for (uint32_t i = part; i < count; i += parts) {
      const bool counts = storage.keys[i] >= threshold && storage.indices[i] < index;
      before += counts ? storage.weights[i] : 0;
    }
  }
  before = sum_parts(before);
  if (mine && part == 0 && key >= threshold && before <= target &&
      target < before + storage.weights[candidate]) {
    write_token(params, out_row, index);
  }
}

}  // namespace detail

}  // namespace flashinfer
