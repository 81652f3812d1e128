// Top-k of long rows by three kernels that read the row once:
//
//   bound kernel    a CTA per row looks at a sample of it, and takes as bound a value that most
//                   likely k elements and not many more reach
//   collect kernel  a CTA per tile of 4096 elements puts those that reach it on the row's list
//   choose kernel   a CTA per row finds the k-th largest element of the list, and writes
//
// A list of at least k elements holds the k largest ones, with all that equal the last: the result
// is exact, whatever the sample was. If the bound was too high or let too many through (thousands
// of equal elements), the choose kernel searches the whole row as in topk.cuh.
#pragma once

#include <flashinfer/sampling/block_select.cuh>
#include <flashinfer/sampling/topk.cuh>

namespace flashinfer {

namespace detail {

struct TopKWorkspace {
  TopKStream::Row* rows;          // [num_rows]
  TopKStream::Tile* tiles;        // [num_rows, num_tiles]
  TopKStream::Element* elements;  // [num_rows, kCapacity]
  uint32_t num_tiles;

  __device__ __forceinline__ TopKWorkspace(const TopKParams& params)
      : num_tiles(TopKStream::num_tiles(params.num_cols)) {
    rows = static_cast<TopKStream::Row*>(params.workspace);
    tiles = reinterpret_cast<TopKStream::Tile*>(rows + params.num_rows);
    elements =
        reinterpret_cast<TopKStream::Element*>(tiles + uint64_t{params.num_rows} * num_tiles);
  }

  __device__ __forceinline__ TopKStream::Tile* row_tiles(uint32_t row_idx) const {
    return tiles + uint64_t{row_idx} * num_tiles;
  }
  __device__ __forceinline__ TopKStream::Element* row_elements(uint32_t row_idx) const {
    return elements + uint64_t{row_idx} * TopKStream::kCapacity;
  }
};

// As float_to_key, with NaN as +inf.
__device__ __forceinline__ uint32_t top_k_key(float x) {
  return float_to_key(x != x ? -negative_infinity() : x);
}

// Spreads consecutive numbers over 32 bits, so that a sample has no period that data could have.
__device__ __forceinline__ uint32_t scatter_bits(uint32_t x) {
  x = (x ^ x >> 16) * 0x9e3779b1u;
  return (x ^ x >> 15) * 0x85ebca6bu;
}

}  // namespace detail

// Grid: rows; 512 threads.
template <typename Traits>
__global__ void __launch_bounds__(512)
    top_k_bound_kernel(const __grid_constant__ TopKParams params) {
  using T = typename Traits::T;
  using Row = RowCluster<T, false>;
  constexpr int kVecs = TopKStream::kSampleSize / 512 / Row::kVecSize;
  __shared__ BlockSelectStorage storage;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const uint32_t row_idx = blockIdx.x;
  const detail::TopKWindow<T> window(params, row_idx);
  if (window.length <= params.k) return;
  const Row row(window.data, window.length, nullptr, 0, nullptr);

  // One vector of each of as many stretches of equal length, or every vector of a short row.
  const uint32_t num_vecs = ceil_div(row.phase + row.size, static_cast<uint32_t>(Row::kVecSize));
  const uint32_t num_samples = min(num_vecs, 512u * kVecs);
  typename Row::Vec x[kVecs];
  uint32_t vecs[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t sample = i * 512 + threadIdx.x;
    const auto first = static_cast<uint32_t>(uint64_t{sample} * num_vecs / num_samples);
    const auto end = static_cast<uint32_t>(uint64_t{sample + 1} * num_vecs / num_samples);
    vecs[i] = sample < num_samples ? first + __umulhi(detail::scatter_bits(sample), end - first)
                                   : num_vecs;
    if (vecs[i] < num_vecs) x[i] = row.load_global(vecs[i]);
  }
  uint32_t keys[kVecs * Row::kVecSize];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
#pragma unroll
    for (int j = 0; j < Row::kVecSize; ++j) {
      const bool inside = vecs[i] < num_vecs && row.index_of(vecs[i]) + j < row.size;
      keys[i * Row::kVecSize + j] = inside ? detail::top_k_key(x[i][j]) : 0;
    }
  }

  // Of k elements the sample has about k * share; six standard deviations more are asked for.
  const float share = fminf(static_cast<float>(num_samples) / static_cast<float>(num_vecs), 1.f);
  const float expected = static_cast<float>(params.k) * share;
  const float margin = (6.f * sqrtf(expected * (1.f - share)) + 4.f) * (share < 1.f);
  KeyRange range = detail::key_range(storage, keys);
  const auto target = static_cast<uint32_t>(expected + margin + 0.5f);
#pragma unroll 1
  for (int round = 0; round < 3 && range.low < range.high && range.above + range.inside > target;
       ++round) {
    if (round > 0 && range.inside <= 4) break;
    range = detail::narrow(storage, keys, range, target);
  }
  if (threadIdx.x == 0) {
    detail::TopKWorkspace(params).rows[row_idx] = {key_to_float(range.low), 0};
  }
}

// Grid (tiles, rows from first_row on), 256 threads.
template <typename Traits>
__global__ void __launch_bounds__(256)
    top_k_collect_kernel(const __grid_constant__ TopKParams params) {
  using T = typename Traits::T;
  using Row = RowCluster<T, false>;
  constexpr int kThreads = 256, kVecSize = Row::kVecSize;
  constexpr int kVecs = TopKStream::kTileSize / kThreads / kVecSize;
  __shared__ uint64_t warp_counts[kThreads / 32];
  __shared__ uint32_t base;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const uint32_t row_idx = static_cast<uint32_t>(params.first_row) + blockIdx.y;
  const detail::TopKWindow<T> window(params, row_idx);
  if (window.length <= params.k) return;
  const Row row(window.data, window.length, nullptr, 0, nullptr);
  const uint32_t first_vec = blockIdx.x * (TopKStream::kTileSize / kVecSize);
  const uint32_t num_vecs = ceil_div(row.phase + row.size, static_cast<uint32_t>(kVecSize));
  if (first_vec >= num_vecs) return;
  const detail::TopKWorkspace workspace(params);
  const float bound = workspace.rows[row_idx].bound;

  typename Row::Vec x[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t vec = first_vec + i * kThreads + threadIdx.x;
    if (vec < num_vecs) x[i] = row.load_global(vec);
  }
  // Elements that reach the bound (NaN does), and their number in 16 bits per vector.
  uint32_t reaches[kVecs];
  uint64_t mine = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t vec = first_vec + i * kThreads + threadIdx.x;
    reaches[i] = 0;
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      const bool inside = vec < num_vecs && row.index_of(vec) + j < row.size;
      reaches[i] |= static_cast<uint32_t>(inside && !(x[i][j] < bound)) << j;
    }
    mine += static_cast<uint64_t>(__popc(reaches[i])) << (16 * i);
  }
  uint64_t inclusive = warp_inclusive_sum(mine);
  const uint32_t warp_idx = threadIdx.x / 32;
  if (threadIdx.x % 32 == 31) warp_counts[warp_idx] = inclusive;
  __syncthreads();
  uint64_t totals = 0;
#pragma unroll
  for (uint32_t w = 0; w < kThreads / 32; ++w) {
    const uint64_t count = warp_counts[w];
    if (w < warp_idx) inclusive += count;
    totals += count;
  }
  if (threadIdx.x == 0) {
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) count += static_cast<uint32_t>(totals >> (16 * i)) & 0xffffu;
    base = count == 0 ? 0 : atomicAdd(&workspace.rows[row_idx].count, count);
    workspace.row_tiles(row_idx)[blockIdx.x] = {base, count};
  }
  __syncthreads();
  if (mine == 0) return;
  uint32_t vec_base = base;
  const uint64_t before = inclusive - mine;
  TopKStream::Element* list = workspace.row_elements(row_idx);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    uint32_t slot = vec_base + (static_cast<uint32_t>(before >> (16 * i)) & 0xffffu);
    vec_base += static_cast<uint32_t>(totals >> (16 * i)) & 0xffffu;
    const uint32_t first = row.index_of(first_vec + i * kThreads + threadIdx.x);
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      if (reaches[i] >> j & 1) {
        if (slot < TopKStream::kCapacity) list[slot] = {x[i][j], first + j};
        ++slot;
      }
    }
  }
}

// The row's list in index order.
struct TopKChooseStorage {
  union {
    struct {
      uint32_t keys[TopKStream::kCapacity];
      uint32_t indices[TopKStream::kCapacity];
    };
    SelectStorage whole_row;
  };
  BlockSelectStorage select;
  uint64_t gathered[2 * 512 / 32];
};

namespace detail {

// Copies the row's list into shared memory. The tiles wrote their parts in any order.
__device__ __forceinline__ void load_list(TopKChooseStorage& storage,
                                          const TopKWorkspace& workspace, uint32_t row_idx,
                                          uint32_t num_tiles) {
  const uint32_t lane_idx = threadIdx.x % 32;
  const TopKStream::Tile* tiles = workspace.row_tiles(row_idx);
  const TopKStream::Element* list = workspace.row_elements(row_idx);
  uint32_t before = 0;
  for (uint32_t tile_base = 0; tile_base < num_tiles; tile_base += 32) {
    const uint32_t tile = tile_base + lane_idx;
    TopKStream::Tile mine{0, 0};
    if (tile < num_tiles) mine = tiles[tile];
    const auto inclusive = static_cast<uint32_t>(warp_inclusive_sum(mine.count));
    for (uint32_t t = threadIdx.x / 32; t < 32; t += blockDim.x / 32) {
      const uint32_t base = __shfl_sync(0xffffffffu, mine.base, t);
      const uint32_t count = __shfl_sync(0xffffffffu, mine.count, t);
      const uint32_t to = before + __shfl_sync(0xffffffffu, inclusive, t) - count;
      for (uint32_t i = lane_idx; i < count; i += 32) {
        const TopKStream::Element element = list[base + i];
        storage.keys[to + i] = top_k_key(element.value);
        storage.indices[to + i] = element.index;
      }
    }
    before += __shfl_sync(0xffffffffu, inclusive, 31);
  }
  __syncthreads();
}

}  // namespace detail

// Grid: rows; 512 threads.
template <typename Traits>
__global__ void __launch_bounds__(512, 1)
    top_k_choose_kernel(const __grid_constant__ TopKParams params) {
  using T = typename Traits::T;
  constexpr int kMaxMine = TopKStream::kCapacity / 512;
  __shared__ TopKChooseStorage storage;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const uint32_t row_idx = blockIdx.x;
  const detail::TopKWindow<T> window(params, row_idx);
  if (window.length <= params.k) {
    detail::write_whole_window<Traits>(params, row_idx, window, threadIdx.x, blockDim.x);
    return;
  }
  const detail::TopKWorkspace workspace(params);
  const uint32_t count = workspace.rows[row_idx].count;
  RowCluster<T, false, detail::NanIsInf> row(window.data, window.length, nullptr, 0,
                                             storage.gathered);
  if (count < params.k || count > TopKStream::kCapacity) {
    const float infinity = -negative_infinity();
    const RowMaxima anything{infinity, -infinity, -infinity};
    detail::search_row<Traits>(params, row_idx, row, storage.whole_row, anything);
    return;
  }
  const uint32_t row_tiles = ceil_div(row.phase + row.size, TopKStream::kTileSize);
  detail::load_list(storage, workspace, row_idx, row_tiles);

  // Consecutive elements to a thread, so that counting in thread order is counting in index order.
  const uint32_t per_thread = ceil_div(count, 512u);
  const uint32_t first = threadIdx.x * per_thread;
  uint32_t keys[kMaxMine];
#pragma unroll
  for (uint32_t i = 0; i < kMaxMine; ++i) {
    keys[i] = i < per_thread && first + i < count ? storage.keys[first + i] : 0;
  }
  KeyRange range = detail::key_range(storage.select, keys);
  range.inside = count;
  const uint32_t threshold = detail::select_key(storage.select, keys, range, params.k);

  uint32_t mine = 0;  // larger elements in the upper half, equal ones in the lower
#pragma unroll
  for (int i = 0; i < kMaxMine; ++i) {
    mine += static_cast<uint32_t>(keys[i] > threshold) << 16 | (keys[i] == threshold);
  }
  uint32_t total;
  const uint32_t before =
      detail::block_inclusive_sum(mine, storage.select.warp_counts, &total) - mine;
  const detail::EqualElements equals(params, total >> 16, total & 0xffffu);
  uint32_t larger_before = before >> 16, equal_before = before & 0xffffu;
#pragma unroll
  for (uint32_t i = 0; i < kMaxMine; ++i) {
    if (keys[i] < threshold) continue;
    const bool is_larger = keys[i] > threshold;
    const uint32_t chosen_before = equals.chosen_of(equal_before);
    if (is_larger || equals.chosen_of(equal_before + 1) != chosen_before) {
      const uint32_t index = storage.indices[first + i];
      // A key tells the value but for zeros and NaN.
      const float value = key_to_float(keys[i]);
      const bool told = value != 0.f && value < -negative_infinity();
      detail::write_top_k<Traits>(params, row_idx, larger_before + chosen_before, index,
                                  told ? from_float<T>(value) : window.data[index]);
    }
    larger_before += is_larger;
    equal_before += !is_larger;
  }
}

#ifndef __CUDACC_RTC__

template <typename Traits>
inline cudaError_t launch_top_k_stream(const TopKParams& params, bool enable_pdl,
                                       cudaStream_t stream) {
  const dim3 rows(params.num_rows), threads(512);
  cudaError_t status =
      launch_kernel(top_k_bound_kernel<Traits>, rows, threads, 0, stream, enable_pdl, params);
  if (status == cudaSuccess) {
    status =
        launch_row_tiles(top_k_collect_kernel<Traits>, 256, TopKStream::num_tiles(params.num_cols),
                         params.num_rows, params, enable_pdl, stream);
  }
  if (status == cudaSuccess) {
    status =
        launch_kernel(top_k_choose_kernel<Traits>, rows, threads, 0, stream, enable_pdl, params);
  }
  return status;
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
