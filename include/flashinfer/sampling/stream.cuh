// Draws that need one look at every element and a second at few: plain sampling, and top-k with
// small k.
//
//   tile kernel     reads the rows once, at the speed of memory, and leaves a sum of weights per
//   tile of 4096 elements
//                   and, for top-k, the maximum of each group of 128
//   finish kernel   one CTA per row: picks a tile by the sums, or collects the elements of the
//   groups whose maximum
//                   reaches the k-th largest one (every element of the k largest is in such a
//                   group), and draws
//
// Tiles and groups are cut by index, so a row's result does not depend on its address or its batch.
// A row whose k largest do not fit the short list (large k, or many equal values) is searched
// whole, by the same steps as in sampling.cuh.
#pragma once

#include <flashinfer/sampling/sampling.cuh>

namespace flashinfer {

namespace detail {

// Of a row of logits whose softmax is written; draws have none.
template <typename Traits>
__device__ __forceinline__ float inv_temperature(const SamplingParams& params, uint32_t row) {
  if constexpr (Traits::kLogits && Traits::kOutput == SamplingOutput::kProbs) {
    return 1.f / params.temperature[row];
  } else {
    return 1.f;
  }
}

template <typename T>
__device__ __forceinline__ bool row_is_aligned(const T* row) {
  return reinterpret_cast<uintptr_t>(row) % 16 == 0;
}

// N elements from `first` on, by a vector where the row allows; -inf beyond its end.
template <int N, typename T>
__device__ __forceinline__ void load_elements(const T* row, bool aligned, uint32_t size,
                                              uint32_t first, float (&x)[N]) {
  if (aligned && first + N <= size) {
    Vector<T, N> vec;
    vec.load(row + first);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = vec[j];
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      x[j] = first + j < size ? to_float(row[first + j]) : negative_infinity();
    }
  }
}

}  // namespace detail

// Measured on an H200, 64 and 256 rows of 128256 float32: without group maxima 128 threads
// take 13.4 and 37.9 us for the whole draw (256: 14.8, 37.7; 512: 16.5, 43.7), with them 256
// take 18.8 and 51.6 (128: 20.6, 54.7; 512: 20.6, 59.3). Tiles of 2048 or 8192 elements gain
// nothing.
template <typename Traits>
inline constexpr int kTileThreads = Traits::kTopK ? 256 : 128;

namespace detail {

// First pass over a tile.
template <typename Traits>
__device__ __forceinline__ void sum_tile(const SamplingParams& params, uint32_t row_idx,
                                         uint32_t tile, uint32_t num_tiles) {
  using T = typename Traits::T;
  constexpr int kThreads = kTileThreads<Traits>, kVecSize = 16 / sizeof(T);
  constexpr int kVecs = StreamLayout::kTileSize / kThreads / kVecSize;
  constexpr int kGroupLanes = StreamLayout::kGroupSize / kVecSize;
  __shared__ float warp_max[kThreads / 32];
  __shared__ uint64_t warp_sum[kThreads / 32];
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
  auto* stats = static_cast<TileStat*>(params.workspace);
  auto* group_max = reinterpret_cast<float*>(stats + uint64_t{params.num_input_rows} * num_tiles);
  const T* row = static_cast<const T*>(params.input) + row_idx * params.input_stride;
  const bool aligned = detail::row_is_aligned(row);
  const uint64_t stat_idx = uint64_t{row_idx} * num_tiles + tile;

  float x[kVecs][kVecSize];
  float max = negative_infinity();
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t vec = i * kThreads + threadIdx.x;
    detail::load_elements(row, aligned, params.vocab_size,
                          tile * StreamLayout::kTileSize + vec * kVecSize, x[i]);
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    float vec_max = x[i][0];
#pragma unroll
    for (int j = 1; j < kVecSize; ++j) vec_max = detail::max_nan(vec_max, x[i][j]);
    if constexpr (Traits::kTopK) {
#pragma unroll
      for (int offset = kGroupLanes / 2; offset > 0; offset /= 2) {
        vec_max = detail::max_nan(vec_max, __shfl_xor_sync(0xffffffffu, vec_max, offset));
      }
      if (lane_idx % kGroupLanes == 0) {
        const uint32_t group = (i * kThreads + threadIdx.x) / kGroupLanes;
        group_max[stat_idx * StreamLayout::kGroupsPerTile + group] = vec_max;
      }
    }
    max = detail::max_nan(max, vec_max);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    max = detail::max_nan(max, __shfl_xor_sync(0xffffffffu, max, offset));
  }
  if (lane_idx == 0) warp_max[warp_idx] = max;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) max = detail::max_nan(max, warp_max[w]);

  const typename Traits::Weight weight(max, detail::inv_temperature<Traits>(params, row_idx));
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) sum += weight(x[i][j]);
  }
  sum = warp_sum_u64(sum);
  if (lane_idx == 0) warp_sum[warp_idx] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) sum += warp_sum[w];
    stats[stat_idx] = {sum, max};
  }
}

}  // namespace detail

// Grid (tiles, input rows from first_row on), kTileThreads threads.
template <typename Traits>
__global__ void __launch_bounds__(kTileThreads<Traits>)
    tile_kernel(const __grid_constant__ SamplingParams params) {
  detail::sum_tile<Traits>(params, static_cast<uint32_t>(params.first_row) + blockIdx.y, blockIdx.x,
                           gridDim.x);
}

// Shared memory of the finish kernel.
struct FinishStorage {
  static constexpr uint32_t kFinishWarps = 16;
  static constexpr uint32_t kNumBins = 1024;
  static constexpr uint32_t kMaxHot = 512;         // groups that are looked at again
  static constexpr uint32_t kMaxCandidates = 512;  // elements that are ranked, by all pairs

  union {
    struct {
      uint32_t bins[kNumBins];
      uint32_t hot_groups[kMaxHot];
      uint32_t keys[kMaxCandidates];
      uint32_t indices[kMaxCandidates];
      uint64_t weights[kMaxCandidates];
    };
    SelectStorage select;  // of the search of the whole row
  };
  uint64_t warp_values[2 * kFinishWarps];
  uint32_t warp_counts[kFinishWarps];
  uint32_t num_hot, num_candidates;
  uint32_t crossing, in_crossing, above;
  uint32_t top_k_key, top_p_key;
  uint64_t kept;
};

namespace detail {

// Statistics of a row's tiles, held by each warp on its own: lane l has tiles l, l + 32, ...
template <typename Weight, int kMaxTiles = StreamLayout::kMaxTiles>
struct TileSums {
  static constexpr int kPerLane = kMaxTiles / 32;
  float max;                // of the row
  uint64_t total;           // of the row
  uint64_t sums[kPerLane];  // in units of the row's weight
  TileStat stats[kPerLane];

  __device__ __forceinline__ void load(const TileStat* tiles, uint32_t num_tiles,
                                       float inv_temperature = 1.f) {
    const uint32_t lane_idx = threadIdx.x % 32;
    max = negative_infinity();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      stats[i] = {0, negative_infinity()};
      if (lane_idx + 32 * i < num_tiles) stats[i] = tiles[lane_idx + 32 * i];
      max = max_nan(max, stats[i].max);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      max = max_nan(max, __shfl_xor_sync(0xffffffffu, max, offset));
    }
    const Weight weight(max, inv_temperature);
    total = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      sums[i] = stats[i].sum == 0 ? 0
                                  : static_cast<uint64_t>(static_cast<double>(stats[i].sum) *
                                                          weight.relative(stats[i].max));
      total += sums[i];
    }
    total = warp_sum_u64(total);
  }

  // The tile where the running sum passes `target`, which is less than the total, and the target in
  // the units of that tile's weight.
  __device__ __forceinline__ uint32_t find(uint64_t target, uint64_t* local,
                                           float* tile_max) const {
    uint64_t before = 0, inside = 0, last = 0;
    float found_max = 0.f;
    uint32_t tile = 0;
    bool found = false;
    const Weight weight(max, 1.f);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint64_t inclusive = before + warp_inclusive_sum(sums[i]);
      const uint32_t passed = __ballot_sync(0xffffffffu, inclusive > target);
      if (!found && passed) {
        found = true;
        const int lane = __ffs(static_cast<int>(passed)) - 1;
        tile = 32 * i + lane;
        inside = __shfl_sync(0xffffffffu, target - (inclusive - sums[i]), lane);
        last = __shfl_sync(0xffffffffu, stats[i].sum - 1, lane);
        found_max = __shfl_sync(0xffffffffu, stats[i].max, lane);
      }
      before = __shfl_sync(0xffffffffu, inclusive, 31);
    }
    const float unit = weight.relative(found_max);
    const auto scaled = static_cast<uint64_t>(static_cast<double>(inside) * __fdividef(1.f, unit));
    *local = scaled < last ? scaled : last;
    *tile_max = found_max;
    return tile;
  }
};

// Calls `found` with index and value of the element of a tile where the running sum of weights from
// `threshold` on passes `target`, or of the last one, in the one thread that has it.
// 512 threads; `warp_values` holds 16.
template <typename T, typename Weight, typename Found>
__device__ __forceinline__ void draw_from_tile(const T* row, uint32_t size, uint32_t tile,
                                               const Weight& weight, float threshold,
                                               uint64_t target, uint64_t* warp_values,
                                               Found found) {
  constexpr int kPerThread = StreamLayout::kTileSize / 512;
  constexpr int kVecSize = 16 / sizeof(T);
  constexpr int kLoad = kPerThread < kVecSize ? kPerThread : kVecSize;
  const uint32_t first = tile * StreamLayout::kTileSize + threadIdx.x * kPerThread;
  const bool aligned = row_is_aligned(row);
  uint64_t weights[kPerThread];
  float values[kPerThread];
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread / kLoad; ++i) {
    float x[kLoad];
    load_elements(row, aligned, size, first + i * kLoad, x);
#pragma unroll
    for (int j = 0; j < kLoad; ++j) {
      values[i * kLoad + j] = x[j];
      weights[i * kLoad + j] = x[j] >= threshold ? weight(x[j]) : 0;
      sum += weights[i * kLoad + j];
    }
  }
  uint64_t inclusive = warp_inclusive_sum(sum);
  if (threadIdx.x % 32 == 31) warp_values[threadIdx.x / 32] = inclusive;
  __syncthreads();
  uint64_t total = 0;
#pragma unroll
  for (uint32_t w = 0; w < 16; ++w) {
    if (w < threadIdx.x / 32) inclusive += warp_values[w];
    total += warp_values[w];
  }
  target = min(target, total - 1);
  uint64_t before = inclusive - sum;
  if (target < before || target >= inclusive) return;
  uint32_t index = 0;
  float value = 0.f;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if (target >= before && weights[j] != 0) {
      index = first + j;
      value = values[j];
    }
    before += weights[j];
  }
  found(index, value);
}

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

// A key that at least k of the group keys reach, and few more: the lower end of a histogram's bin,
// which is cut once more if it holds many. storage.bins is zero, and is not when this returns.
__device__ __forceinline__ uint32_t group_bound(FinishStorage& storage, const GroupKeys& groups,
                                                uint32_t row_max_key, uint32_t k) {
  const uint32_t lane_idx = threadIdx.x % 32, warp_idx = threadIdx.x / 32;
  // Each quarter of a warp has a group that reaches the least of the quarters' largest.
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
    // 512 threads, two bins each.
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
    // Groups beyond the k-th cost a look each.
    if (shift == 0 || round == 1 || above + storage.in_crossing <= k + 32) break;
    for (uint32_t i = threadIdx.x; i < FinishStorage::kNumBins; i += blockDim.x)
      storage.bins[i] = 0;
    __syncthreads();
  }
  return low;
}

// Fills storage.keys, indices and weights with all elements that reach the k-th largest group
// maximum. False if they are too many.
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

// Filters the candidates by top-k and top-p and draws one, in index order. `total`: of the row.
template <typename Traits>
__device__ __forceinline__ void draw_from_candidates(const SamplingParams& params,
                                                     FinishStorage& storage, uint32_t k, float p,
                                                     uint64_t total, uint64_t bits,
                                                     uint32_t out_row) {
  // One thread per candidate, or four where there are as many.
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
  uint64_t from_here = 0;  // sum of the weights of candidates that are not smaller
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

// Grid: output rows; 512 threads.
template <typename Traits>
__global__ void __launch_bounds__(512, 1)
    finish_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  __shared__ FinishStorage storage;
  if constexpr (Traits::kTopK) {
    for (uint32_t i = threadIdx.x; i < FinishStorage::kNumBins; i += blockDim.x)
      storage.bins[i] = 0;
    if (threadIdx.x == 0) {
      storage.num_hot = storage.num_candidates = 0;
      storage.top_k_key = storage.top_p_key = 0;
    }
  }
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  const uint32_t out_row = blockIdx.x;
  const uint64_t input_row = detail::input_row_of(params, out_row);
  const bool exists = input_row < params.num_input_rows;
  const uint32_t num_tiles = StreamLayout::num_tiles(params.vocab_size);
  const auto* stats = static_cast<const TileStat*>(params.workspace);
  const auto* group_max =
      reinterpret_cast<const float*>(stats + uint64_t{params.num_input_rows} * num_tiles);
  [[maybe_unused]] detail::GroupKeys groups;
  if constexpr (Traits::kTopK) {
    groups.load(group_max + input_row * num_tiles * StreamLayout::kGroupsPerTile,
                exists ? ceil_div(params.vocab_size, StreamLayout::kGroupSize) : 0);
  }
  detail::TileSums<typename Traits::Weight> tiles;
  tiles.load(stats + (exists ? input_row * num_tiles : 0), exists ? num_tiles : 0);

  const uint32_t param_row = exists ? static_cast<uint32_t>(input_row) : 0;
  float p = 1.f;
  int32_t k = 0;
  if constexpr (Traits::kTopP) p = params.top_p[param_row];
  if constexpr (Traits::kTopK) k = params.top_k[param_row];
  const bool valid = detail::has_distribution<Traits::kLogits>(tiles.max) && p == p;
  if (threadIdx.x == 0 && params.valid) params.valid[out_row] = valid;
  if (!valid) {
    if (threadIdx.x == 0) detail::write_token(params, out_row, 0);
    return;
  }
  const T* row = static_cast<const T*>(params.input) + input_row * params.input_stride;
  const uint64_t bits = detail::row_bits(params, out_row);
  const bool filtered = (k >= 1 && static_cast<uint32_t>(k) < params.vocab_size) || p < 1.f;
  if (!filtered) {
    uint64_t target;
    float tile_max;
    const uint32_t tile = tiles.find(__umul64hi(bits, tiles.total), &target, &tile_max);
    detail::draw_from_tile(
        row, params.vocab_size, tile, typename Traits::Weight(tile_max, 1.f), negative_infinity(),
        target, storage.warp_values,
        [&](uint32_t token, float) { detail::write_token(params, out_row, token); });
    return;
  }
  if constexpr (Traits::kTopK) {
    const typename Traits::Weight weight(tiles.max, 1.f);
    if (k >= 1 && detail::collect_top_groups<Traits>(params, storage, row, groups, tiles.max,
                                                     weight, static_cast<uint32_t>(k))) {
      detail::draw_from_candidates<Traits>(params, storage, static_cast<uint32_t>(k), p,
                                           tiles.total, bits, out_row);
      return;
    }
    __syncthreads();
    RowCluster<T, false> whole(row, params.vocab_size, nullptr, 0, storage.warp_values);
    const RowMaxima maxima{tiles.max, negative_infinity(), negative_infinity()};
    const float threshold =
        detail::find_threshold<Traits>(whole, storage.select, maxima, weight, k, p, 0.f);
    detail::draw_from_row(params, whole, weight, threshold, bits, out_row);
  }
}

#ifndef __CUDACC_RTC__

// Launches a kernel of one CTA per tile on all rows of a draw.
inline cudaError_t launch_tiles(void (*kernel)(SamplingParams), int threads, uint32_t num_rows,
                                const SamplingParams& params, bool enable_pdl,
                                cudaStream_t stream) {
  return launch_row_tiles(kernel, threads, StreamLayout::num_tiles(params.vocab_size), num_rows,
                          params, enable_pdl, stream);
}

template <typename Traits>
inline cudaError_t launch_stream_sampling(const SamplingParams& params, bool enable_pdl,
                                          cudaStream_t stream) {
  const cudaError_t status = launch_tiles(tile_kernel<Traits>, kTileThreads<Traits>,
                                          params.num_input_rows, params, enable_pdl, stream);
  if (status != cudaSuccess) return status;
  return launch_kernel(finish_kernel<Traits>, dim3(params.num_rows), dim3(512), 0, stream,
                       enable_pdl, params);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
