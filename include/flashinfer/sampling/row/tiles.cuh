// Rows cut into tiles of 4096 elements: a first pass that leaves sums of weights per tile, at the
// speed of memory, and draws that start from these sums.
//
// Tiles are cut by index, so a row's result does not depend on its address or its batch.
//
// Measurements, also of what lost: docs/tuning/sampling.md.
#pragma once

#include <flashinfer/sampling/row/sampling.cuh>

namespace flashinfer {

namespace detail {

// Reciprocal temperature of a row whose softmax is written; draws have none.
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

// Loads N elements from `first` on, by vectors where the row allows it; -inf after the row's end.
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

// The fastest thread counts with and without group maxima. Tiles of 2048 or 8192 elements gain
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

namespace detail {

// Statistics of a row's tiles, held by each warp: lane l has tiles l, l + 32, ...
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

  // Finds the tile where the running sum passes `target`, which is less than the total, and
  // converts the target to the units of that tile's weight.
  __device__ __forceinline__ uint32_t find(uint64_t target, uint64_t* local,
                                           float* tile_max) const {
    uint64_t inside = 0, last = 0;
    float found_max = 0.f;
    uint32_t tile = 0;
    const Weight weight(max, 1.f);
    bool found = false;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (found) continue;
      const uint64_t inclusive = warp_inclusive_sum(sums[i]);
      const uint32_t passed = __ballot_sync(0xffffffffu, inclusive > target);
      if (passed) {
        const int lane = __ffs(static_cast<int>(passed)) - 1;
        tile = 32 * i + lane;
        inside = __shfl_sync(0xffffffffu, target - (inclusive - sums[i]), lane);
        last = __shfl_sync(0xffffffffu, stats[i].sum - 1, lane);
        found_max = __shfl_sync(0xffffffffu, stats[i].max, lane);
        found = true;
      }
      target -= __shfl_sync(0xffffffffu, inclusive, 31);
    }
    const float unit = weight.relative(found_max);
    const auto scaled = static_cast<uint64_t>(static_cast<double>(inside) * __fdividef(1.f, unit));
    *local = scaled < last ? scaled : last;
    *tile_max = found_max;
    return tile;
  }
};

// Finds the element of a tile where the running sum of the weights that are at least `threshold`
// passes `target`, or the last such element, and calls `found` with its index and value in the one
// thread that owns it. 512 threads; `warp_values` holds 16.
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

}  // namespace detail

#ifndef __CUDACC_RTC__

// Launches a kernel with one CTA per tile on all rows of a draw.
inline cudaError_t launch_tiles(void (*kernel)(SamplingParams), int threads, uint32_t num_rows,
                                const SamplingParams& params, bool enable_pdl,
                                cudaStream_t stream) {
  return launch_row_tiles(kernel, threads, StreamLayout::num_tiles(params.vocab_size), num_rows,
                          params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
