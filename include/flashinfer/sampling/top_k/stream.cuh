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

#include <flashinfer/sampling/top_k/block_select.cuh>
#include <flashinfer/sampling/top_k/topk.cuh>

namespace flashinfer {

namespace detail {

struct TopKWorkspace {
  TopKStream::Row* rows;          // [num_rows]
  TopKStream::Element* elements;  // [num_rows, kCapacity], a row's in no order

  __device__ __forceinline__ TopKWorkspace(const TopKParams& params) {
    rows = static_cast<TopKStream::Row*>(params.workspace);
    elements = reinterpret_cast<TopKStream::Element*>(rows + params.num_rows);
  }

  __device__ __forceinline__ TopKStream::Element* list(uint32_t row_idx) const {
    return elements + uint64_t{row_idx} * TopKStream::kCapacity;
  }
};

// Scatters consecutive numbers over 32 bits, so that the sample has no period that data could
// share.
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
  constexpr int kVecSize = Row::kVecSize, kKeys = TopKStream::kSampleSize / 512;
  constexpr int kVecs = kKeys / kVecSize;
  __shared__ BlockSelectStorage storage;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const uint32_t row_idx = blockIdx.x;
  const detail::TopKWindow<T> window(params, row_idx);
  if (window.length <= params.k) return;
  const Row row(window.data, window.length, nullptr, 0, nullptr);

  // The sample takes four vectors (64 bytes of memory) from each of many stretches of equal length.
  // A short row is sampled whole.
  constexpr uint32_t kRun = 4;
  const uint32_t num_vecs = ceil_div(row.phase + row.size, static_cast<uint32_t>(kVecSize));
  const uint32_t num_runs = ceil_div(num_vecs, kRun),
                 num_samples = min(num_runs, 512u * kVecs / kRun);
  typename Row::Vec x[kVecs];
  uint32_t vecs[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t sample = (i * 512 + threadIdx.x) / kRun;
    const uint32_t first = sample * num_runs / num_samples;
    const uint32_t end = (sample + 1) * num_runs / num_samples;
    const uint32_t run = first + __umulhi(detail::scatter_bits(sample), end - first);
    vecs[i] = sample < num_samples ? run * kRun + threadIdx.x % kRun : num_vecs;
    if (vecs[i] < num_vecs) x[i] = row.load_global(vecs[i]);
  }
  uint32_t keys[kKeys];
  uint32_t most = 0, least = 0xffffffffu;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      const bool inside = vecs[i] < num_vecs && row.index_of(vecs[i]) + j < row.size;
      const uint32_t key = inside ? detail::top_k_key(x[i][j]) : 0;
      keys[i * kVecSize + j] = key;
      most = max(most, key);
      least = inside ? min(least, key) : least;
    }
  }

  // The sample holds about k * share of the k largest elements. The target adds six standard
  // deviations.
  const float share = fminf(static_cast<float>(num_samples) / static_cast<float>(num_runs), 1.f);
  const float expected = static_cast<float>(params.k) * share;
  const float margin = (6.f * sqrtf(expected * (1.f - share)) + 4.f) * (share < 1.f);
  const auto target = static_cast<uint32_t>(expected + margin + 0.5f);
  // The smallest of the lane pairs' maxima is reached by at least as many elements as there are
  // pairs.
  if (num_samples == 512 * kVecs / kRun && target <= 240) {
    least = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
  }
  const uint32_t low = detail::block_extreme<true>(least, storage.warp_counts);
  const uint32_t high = detail::block_extreme<false>(most, storage.ranked);
  KeyInterval range{low, high, 0, 512 * kKeys};
  // The search stops early: a coarse bound only lets a few more elements through.
#pragma unroll 1
  for (int round = 0; round < 3 && range.low < range.high; ++round) {
    if (round > 0 && range.inside <= 4 + target / 16) break;
    range = detail::narrow(storage, keys, range, target);
  }
  if (threadIdx.x == 0) {
    detail::TopKWorkspace(params).rows[row_idx] = {key_to_float(range.low), 0, {}};
  }
}

// Grid (tiles, rows from first_row on), 256 threads.
template <typename Traits>
__global__ void __launch_bounds__(256)
    top_k_collect_kernel(const __grid_constant__ TopKParams params) {
  using T = typename Traits::T;
  using Row = RowCluster<T, false>;
  constexpr int kVecSize = Row::kVecSize;
  constexpr int kVecs = TopKStream::kTileSize / 256 / kVecSize;
  __shared__ uint32_t tile_count, base;
  if (threadIdx.x == 0) tile_count = 0;
  __syncthreads();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const uint32_t row_idx = static_cast<uint32_t>(params.first_row) + blockIdx.y;
  const detail::TopKWindow<T> window(params, row_idx);
  if (window.length <= params.k) return;
  const Row row(window.data, window.length, nullptr, 0, nullptr);
  const detail::TopKWorkspace workspace(params);
  const float bound = workspace.rows[row_idx].bound;
  const uint32_t num_vecs = ceil_div(row.phase + row.size, static_cast<uint32_t>(kVecSize));
  const uint32_t first_vec = blockIdx.x * (TopKStream::kTileSize / kVecSize) + threadIdx.x;

  typename Row::Vec x[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t vec = first_vec + i * 256;
    if (vec < num_vecs) x[i] = row.load_global(vec);
  }
  uint32_t reaches = 0;  // bit mask of the elements that reach the bound; NaN does
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const uint32_t vec = first_vec + i * 256;
    uint32_t mask = 0;
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) mask |= static_cast<uint32_t>(!(x[i][j] < bound)) << j;
    if (!row.is_whole(vec)) {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        if (vec >= num_vecs || row.index_of(vec) + j >= row.size) mask &= ~(1u << j);
      }
    }
    reaches |= mask << (i * kVecSize);
  }
  const auto count = static_cast<uint32_t>(__popc(reaches));
  uint32_t inclusive = count;
#pragma unroll
  for (uint32_t offset = 1; offset < 32; offset *= 2) {
    const uint32_t before = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (threadIdx.x % 32 >= offset) inclusive += before;
  }
  // One addition in global memory per CTA, since additions to one row are serialized.
  uint32_t warp_base = 0;
  if (threadIdx.x % 32 == 31 && inclusive != 0) warp_base = atomicAdd(&tile_count, inclusive);
  __syncthreads();
  if (threadIdx.x == 0 && tile_count != 0) {
    base = atomicAdd(&workspace.rows[row_idx].count, tile_count);
  }
  __syncthreads();
  uint32_t slot = base + __shfl_sync(0xffffffffu, warp_base, 31) + inclusive - count;
  TopKStream::Element* list = workspace.list(row_idx);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) {
      if (reaches >> (i * kVecSize + j) & 1) {
        if (slot < TopKStream::kCapacity) {
          list[slot] = {x[i][j], row.index_of(first_vec + i * 256) + j};
        }
        ++slot;
      }
    }
  }
}

// A set of a row's indices, and how many of them come before a given one.
struct IndexSet {
  static constexpr uint32_t kWords = TopKStream::kMaxCols / 32;
  static constexpr uint32_t kWordsPerThread = kWords / 512;
  static constexpr uint32_t kCountedWords = 4;

  alignas(16) uint32_t words[kWords];
  uint16_t before[kWords / kCountedWords];

  __device__ __forceinline__ void clear() {
    for (uint32_t i = threadIdx.x; i < kWords; i += 512) words[i] = 0;
  }

  __device__ __forceinline__ void insert(uint32_t i) { atomicOr(&words[i / 32], 1u << i % 32); }

  // Must run between barriers, after the last insert and before the first rank.
  __device__ __forceinline__ void count(uint32_t* warp_counts) {
    uint32_t counts[kWordsPerThread / kCountedWords];
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kWordsPerThread / kCountedWords; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(
          words)[threadIdx.x * (kWordsPerThread / kCountedWords) + i];
      counts[i] = sum;
      sum += __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
    }
    const uint32_t base = detail::block_inclusive_sum(sum, warp_counts) - sum;
#pragma unroll
    for (uint32_t i = 0; i < kWordsPerThread / kCountedWords; ++i) {
      before[threadIdx.x * (kWordsPerThread / kCountedWords) + i] =
          static_cast<uint16_t>(base + counts[i]);
    }
  }

  __device__ __forceinline__ uint32_t rank(uint32_t i) const {
    const uint32_t word = i / 32, first = word / kCountedWords * kCountedWords;
    uint32_t sum = before[word / kCountedWords] + __popc(words[word] & ((1u << i % 32) - 1));
    for (uint32_t w = first; w < word; ++w) sum += __popc(words[w]);
    return sum;
  }
};

struct TopKChooseStorage {
  union {
    IndexSet set;
    SelectStorage whole_row;
  };
  BlockSelectStorage select;
  uint64_t gathered[2 * 512 / 32];
};

// Grid: rows; 512 threads.
template <typename Traits>
__global__ void __launch_bounds__(512, 2)
    top_k_choose_kernel(const __grid_constant__ TopKParams params) {
  using T = typename Traits::T;
  constexpr int kMaxMine = TopKStream::kCapacity / 512;
  __shared__ TopKChooseStorage storage;
  storage.set.clear();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const uint32_t row_idx = blockIdx.x;
  const detail::TopKWindow<T> window(params, row_idx);
  if (window.length <= params.k) {
    detail::write_whole_window<Traits>(params, row_idx, window, threadIdx.x, blockDim.x);
    return;
  }
  const detail::TopKWorkspace workspace(params);
  // The list is fetched before its length is known, which saves a trip to memory.
  TopKStream::Element elements[kMaxMine];
#pragma unroll
  for (int i = 0; i < kMaxMine; ++i) {
    elements[i] = workspace.list(row_idx)[threadIdx.x + 512 * i];
  }
  const uint32_t count = workspace.rows[row_idx].count;
  const float bound = workspace.rows[row_idx].bound;
  if (count < params.k || count > TopKStream::kCapacity) {
    __syncthreads();
    const float infinity = -negative_infinity();
    const RowMaxima anything{infinity, -infinity, -infinity};
    RowCluster<T, false, detail::NanIsInf> whole(window.data, window.length, nullptr, 0,
                                                 storage.gathered);
    detail::search_row<Traits>(params, row_idx, whole, storage.whole_row, anything);
    return;
  }

  uint32_t keys[kMaxMine], indices[kMaxMine];
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kMaxMine; ++i) {
    const bool is_listed = threadIdx.x + 512 * i < count;
    keys[i] = is_listed ? detail::top_k_key(elements[i].value) : 0;
    indices[i] = elements[i].index;
    most = max(most, keys[i]);
  }
  most = detail::block_extreme<false>(most, storage.select.ranked);
  const KeyInterval range{float_to_key(bound), most, 0, count};
  const SelectedKey threshold = detail::select_key(storage.select, keys, range, params.k);

  const uint32_t wanted = params.k - threshold.larger;
  uint32_t chosen = 0;
#pragma unroll
  for (int i = 0; i < kMaxMine; ++i) chosen |= static_cast<uint32_t>(keys[i] >= threshold.key) << i;
  if (wanted != threshold.equal) {
    // Indices decide among equal elements.
#pragma unroll
    for (int i = 0; i < kMaxMine; ++i) {
      if (keys[i] == threshold.key) storage.set.insert(indices[i]);
    }
    __syncthreads();
    storage.set.count(storage.select.warp_counts);
    __syncthreads();
    const uint32_t skipped = params.prefer_large_index ? threshold.equal - wanted : 0;
#pragma unroll
    for (int i = 0; i < kMaxMine; ++i) {
      if (keys[i] == threshold.key && storage.set.rank(indices[i]) - skipped >= wanted) {
        chosen &= ~(1u << i);
      }
    }
    __syncthreads();
    storage.set.clear();
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kMaxMine; ++i) {
    if (chosen >> i & 1) storage.set.insert(indices[i]);
  }
  __syncthreads();
  storage.set.count(storage.select.warp_counts);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kMaxMine; ++i) {
    if (!(chosen >> i & 1)) continue;
    detail::write_top_k<Traits>(params, row_idx, storage.set.rank(indices[i]), indices[i],
                                detail::value_of_key(keys[i], window.data + indices[i]));
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
