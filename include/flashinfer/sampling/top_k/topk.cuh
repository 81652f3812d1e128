// The k largest elements of each row, in the order of their indices, and index transforms for
// sparse attention.
//
//   T = k-th largest value;  chosen = { x > T } and the first (or last) elements equal to T that
//   fill up k
//
// A cluster of CTAs takes a row and reads it once (row/cluster.cuh). Each warp owns a stretch of
// the row, so counting what it chooses gives every element its place in the output: every run gives
// the same result. NaN counts as +inf.
#pragma once

#include <flashinfer/ptx/pdl.cuh>
#include <flashinfer/sampling/row/cluster.cuh>
#include <flashinfer/sampling/row/launch.cuh>
#include <flashinfer/sampling/row/maxima.cuh>
#include <flashinfer/sampling/row/select.cuh>
#include <flashinfer/sampling/topk_params.h>

namespace flashinfer {

template <typename T_, TopKOutput kOutput_>
struct TopKTraits {
  using T = T_;
  static constexpr TopKOutput kOutput = kOutput_;
};

namespace detail {

struct NanIsInf {
  template <typename T, int N>
  __device__ __forceinline__ void apply(Vector<T, N>& x, uint32_t) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (x[j] != x[j]) x.elements[j] = from_float<T>(-negative_infinity());
    }
  }
};

// As float_to_key, but NaN counts as +inf.
__device__ __forceinline__ uint32_t top_k_key(float x) {
  return float_to_key(x != x ? -negative_infinity() : x);
}

// The element of that key at `address`. A key determines the value except for zeros and NaN.
template <typename T>
__device__ __forceinline__ T value_of_key(uint32_t key, const T* address) {
  const float value = key_to_float(key);
  const bool told = value != 0.f && value < -negative_infinity();
  return told ? from_float<T>(value) : *address;
}

// Writes output `slot` of a row: the element at index i of its window, or padding for i = -1.
template <typename Traits>
__device__ __forceinline__ void write_top_k(const TopKParams& params, uint32_t row_idx,
                                            uint32_t slot, int64_t i, typename Traits::T value) {
  const uint64_t out = uint64_t{row_idx} * params.k + slot;
  int64_t index = i;
  if constexpr (Traits::kOutput == TopKOutput::kRagged) {
    if (i >= 0) index = params.offsets[row_idx] + i;
  } else if constexpr (Traits::kOutput == TopKOutput::kPageTable) {
    if (params.raw_indices) params.raw_indices[out] = static_cast<int32_t>(i);
    if (i >= 0) {
      const uint32_t batch = params.row_to_batch ? params.row_to_batch[row_idx] : row_idx;
      const uint32_t start = params.page_starts ? params.page_starts[row_idx] : 0;
      const uint32_t entry = start + static_cast<uint32_t>(i) / params.page_size;
      // A position without an entry has no slot.
      index = -1;
      if (batch < params.num_batches && entry < params.num_entries) {
        const int64_t page = params.page_table[batch * params.page_table_stride + entry];
        index = page * params.page_size + static_cast<uint32_t>(i) % params.page_size;
      }
    }
  } else {
    static_cast<typename Traits::T*>(params.values)[out] = value;
  }
  if (params.indices_are_64bit) {
    static_cast<int64_t*>(params.indices)[out] = index;
  } else {
    static_cast<int32_t*>(params.indices)[out] = static_cast<int32_t>(index);
  }
}

// The window of a row's columns that is searched.
template <typename T>
struct TopKWindow {
  const T* data;
  uint32_t length;

  __device__ __forceinline__ TopKWindow(const TopKParams& params, uint32_t row_idx) {
    uint32_t start = 0;
    length = params.num_cols;
    if (params.row_starts) {
      start = min(static_cast<uint32_t>(max(params.row_starts[row_idx], 0)), params.num_cols);
      length -= start;
    }
    if (params.lengths) {
      length = min(length, static_cast<uint32_t>(max(params.lengths[row_idx], 0)));
    }
    data = static_cast<const T*>(params.input) + row_idx * params.input_stride + start;
  }
};

// Writes a window of at most k columns: all its elements, then padding. `first` and `step` say
// which outputs this thread writes.
template <typename Traits>
__device__ __forceinline__ void write_whole_window(const TopKParams& params, uint32_t row_idx,
                                                   const TopKWindow<typename Traits::T>& window,
                                                   uint32_t first, uint32_t step) {
  for (uint32_t i = first; i < params.k; i += step) {
    if (i < window.length) {
      write_top_k<Traits>(params, row_idx, i, i, window.data[i]);
    } else {
      write_top_k<Traits>(params, row_idx, i, -1, {});
    }
  }
}

// Which elements equal to the k-th largest are chosen: `wanted` of them, after `skipped`.
struct EqualElements {
  uint32_t skipped, wanted;

  __device__ __forceinline__ EqualElements(const TopKParams& params, uint32_t larger,
                                           uint32_t equal)
      : wanted(params.k - larger) {
    skipped = params.prefer_large_index ? equal - wanted : 0;
  }

  // Number of the first `count` equal elements that are chosen.
  __device__ __forceinline__ uint32_t chosen_of(uint32_t count) const {
    return count > skipped ? min(count - skipped, wanted) : 0;
  }
};

// Searches a row, in shared or global memory, and writes what it chooses.
template <typename Traits, typename Row>
__device__ __forceinline__ void search_row(const TopKParams& params, uint32_t row_idx, Row& row,
                                           SelectStorage& storage, const RowMaxima& maxima) {
  const typename Traits::T* window = row.row;
  const uint32_t length = row.size;
  const float threshold = key_to_float(select_top_k(row, storage, maxima, params.k));

  // Counts the larger and the equal elements of each warp's stretch. Elements outside the row are
  // -inf and must not count as equal.
  uint64_t counts = 0;
  for (uint32_t vec = row.first_vec + row.lane_idx; vec < row.end_vec; vec += 32) {
    const typename Row::Vec x = row.load(vec);
#pragma unroll
    for (int j = 0; j < Row::kVecSize; ++j) {
      if (x[j] > threshold) counts += uint64_t{1} << 32;
      if (x[j] == threshold && row.index_of(vec) + j < length) counts += 1;
    }
  }
  const uint64_t* list = row.gather(warp_sum_u64(counts));
  const uint64_t total = row.sum_list(list, row.num_ranks * row.num_warps);
  uint64_t before = row.sum_list(list, row.global_warp());
  const EqualElements equals(params, static_cast<uint32_t>(total >> 32),
                             static_cast<uint32_t>(total));

  if (list[row.global_warp()] == 0) return;
  for (uint32_t base = row.first_vec; base < row.end_vec; base += 32) {
    const uint32_t vec = base + row.lane_idx;
    uint32_t larger = 0, equal = 0;  // bit masks over the vector
    if (vec < row.end_vec) {
      const typename Row::Vec x = row.load(vec);
#pragma unroll
      for (int j = 0; j < Row::kVecSize; ++j) {
        larger |= (x[j] > threshold) << j;
        equal |= (x[j] == threshold && row.index_of(vec) + j < length) << j;
      }
    }
    if (!__any_sync(0xffffffffu, larger | equal)) continue;
    const uint64_t mine = static_cast<uint64_t>(__popc(larger)) << 32 | __popc(equal);
    const uint64_t inclusive = before + warp_inclusive_sum(mine);
    uint32_t larger_before = static_cast<uint32_t>((inclusive - mine) >> 32);
    uint32_t equal_before = static_cast<uint32_t>(inclusive - mine);
    before = __shfl_sync(0xffffffffu, inclusive, 31);
    for (uint32_t rest = larger | equal; rest != 0; rest &= rest - 1) {
      const int j = __ffs(static_cast<int>(rest)) - 1;
      const bool is_larger = larger >> j & 1;
      const uint32_t slot = larger_before + equals.chosen_of(equal_before);
      const bool is_chosen =
          is_larger || equals.chosen_of(equal_before + 1) != equals.chosen_of(equal_before);
      if (is_chosen) {
        const uint32_t i = row.index_of(vec) + j;
        write_top_k<Traits>(params, row_idx, slot, i, window[i]);
      }
      larger_before += is_larger;
      equal_before += !is_larger;
    }
  }
}

}  // namespace detail

// One cluster per row; shared memory as for sampling_kernel.
template <typename Traits>
__global__ void __launch_bounds__(kRowThreadLimit)
    top_k_kernel(const __grid_constant__ TopKParams params) {
  using T = typename Traits::T;
  using Row = RowCluster<T, true, detail::NanIsInf>;
  extern __shared__ __align__(16) uint64_t dynamic_smem[];
  __shared__ SelectStorage storage;
  ptx::cluster_arrive();
  const uint32_t num_ranks = ptx::cluster_size();
  const uint32_t row_idx = blockIdx.x / num_ranks;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  const detail::TopKWindow<T> window(params, row_idx);
  Row row(window.data, window.length, dynamic_smem + Row::list_words(num_ranks, blockDim.x / 32),
          params.max_vecs, dynamic_smem);
  if (window.length <= params.k) {
    ptx::cluster_wait();
    detail::write_whole_window<Traits>(params, row_idx, window, row.rank * blockDim.x + threadIdx.x,
                                       num_ranks * blockDim.x);
    return;
  }
  float thread_max = negative_infinity();
  row.fill([&](float x) { thread_max = fmaxf(thread_max, x); });
  ptx::cluster_wait();
  const RowMaxima maxima = detail::gather_maxima(row, thread_max);
  detail::search_row<Traits>(params, row_idx, row, storage, maxima);
}

#ifndef __CUDACC_RTC__

template <typename Traits>
inline cudaError_t launch_top_k(const TopKParams& params, int device, int num_sms, bool enable_pdl,
                                cudaStream_t stream) {
  const RowLauncher launcher{top_k_kernel<Traits>, device, num_sms};
  return launcher.launch(params, uint64_t{params.num_cols} * sizeof(typename Traits::T), enable_pdl,
                         stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
