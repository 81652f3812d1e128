// The largest element of each row and its index: top-k for k = 1, which reads the row once.
//
// A cluster of CTAs takes a row. Each thread ranks its vectors by their largest elements, and the
// warps' best elements meet in the first CTA. Ranks are unique: no order of work changes the
// result.
//
//   rank = key of the value << 32 | index, or its complement where small indices are preferred
#pragma once

#include <flashinfer/ptx/cluster_exchange.cuh>
#include <flashinfer/sampling/top_k/topk.cuh>

#include <type_traits>

#ifndef __CUDACC_RTC__
#include <algorithm>
#endif

namespace flashinfer {

struct LargestLayout {
  static constexpr uint32_t kMaxCluster = 8;
  static constexpr uint32_t kMaxThreads = 512, kManyThreads = 256;  // of few CTAs, of many
  static constexpr uint32_t kInFlight = 8;  // vectors that a thread loads at a time
};

namespace detail {

// Largest element of a vector; NaN if it has one.
template <typename T, int N>
__device__ __forceinline__ float vector_max(const Vector<T, N>& x) {
#if __CUDA_ARCH__ >= 800
  constexpr int kPairs = sizeof(T) == 2 ? N / 2 : 0;
#else
  constexpr int kPairs = 0;  // max of two halves needs sm_80
#endif
  if constexpr (kPairs != 0) {
    // Two elements per instruction, and none to convert them.
    const auto* pairs = reinterpret_cast<const uint32_t*>(x.elements);
    uint32_t max = pairs[0];
#pragma unroll
    for (int i = 1; i < kPairs; ++i) {
      if constexpr (std::is_same_v<T, dtype::bfloat16>) {
        asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(max) : "r"(pairs[i]));
      } else {
        asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(max) : "r"(pairs[i]));
      }
    }
    return max_nan(to_float(T{static_cast<uint16_t>(max)}),
                   to_float(T{static_cast<uint16_t>(max >> 16)}));
  } else {
    float max = x[0];
#pragma unroll
    for (int j = 1; j < N; ++j) max = max_nan(max, x[j]);
    return max;
  }
}

// Ranks values by key and index, which may be that of a vector.
struct TopKRanking {
  uint32_t flips;  // of an index's bits: all if small indices are preferred

  __device__ __forceinline__ uint64_t rank(float x, uint32_t i) const {
    return uint64_t{top_k_key(x)} << 32 | (i ^ flips);
  }
  __device__ __forceinline__ uint32_t index(uint64_t rank) const {
    return static_cast<uint32_t>(rank) ^ flips;
  }
};

// Rank of the best of this thread's vectors by its largest element; 0 without vectors, which is
// less than any other.
template <typename Row>
__device__ __forceinline__ uint64_t rank_vectors(const Row& row, const TopKRanking& ranking) {
  constexpr uint32_t kInFlight = LargestLayout::kInFlight;
  uint64_t best = 0;
  if (row.first_vec >= row.end_vec) return best;
  // The row's first and last vectors may lie partly outside; -inf stands there, which exceeds
  // nothing inside.
  const uint32_t edge = row.lane_idx == 0 ? row.first_vec : row.end_vec - 1;
  if (row.lane_idx < 2 && !row.is_whole(edge)) {
    best = ranking.rank(vector_max(row.load_global(edge)), edge);
  }
  const uint32_t begin = row.first_vec + !row.is_whole(row.first_vec);
  const uint32_t end = row.end_vec - !row.is_whole(row.end_vec - 1);
  for (uint32_t base = begin + row.lane_idx; base < end; base += 32 * kInFlight) {
    const auto* data = row.row + (static_cast<int64_t>(base) * Row::kVecSize - row.phase);
    typename Row::Vec x[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (base + 32 * i < end) x[i].load(data + 32 * i * Row::kVecSize);
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (base + 32 * i < end) best = max(best, ranking.rank(vector_max(x[i]), base + 32 * i));
    }
  }
  return best;
}

// Rank of this lane's element of the vector of rank `best`, which is still in L1; 0 without one.
template <typename Row>
__device__ __forceinline__ uint64_t rank_element(const Row& row, uint64_t best,
                                                 const TopKRanking& ranking) {
  const uint32_t i = row.index_of(ranking.index(best)) + row.lane_idx;
  const bool exists = best != 0 && row.lane_idx < Row::kVecSize && i < row.size;
  return exists ? ranking.rank(to_float(row.row[i]), i) : 0;
}

}  // namespace detail

// One cluster per row.
template <typename Traits>
__global__ void __launch_bounds__(LargestLayout::kMaxThreads, 2)
    largest_kernel(const __grid_constant__ TopKParams params) {
  using T = typename Traits::T;
  using Row = RowCluster<T>;
  __shared__ ptx::ClusterExchange exchange;
  __shared__ __align__(16)
      uint64_t ranks[2 * LargestLayout::kMaxCluster * LargestLayout::kMaxThreads / 32];
  const uint32_t row_idx = blockIdx.x / ptx::cluster_size();
  const T* data = static_cast<const T*>(params.input) + row_idx * params.input_stride;
  const Row row(data, params.num_cols, nullptr, 0, nullptr);
  const uint32_t num_warps = row.num_ranks * row.num_warps;
  if (threadIdx.x == 0) exchange.init(16 * num_warps);
  ptx::cluster_arrive_relaxed();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  const detail::TopKRanking ranking{params.prefer_large_index ? 0 : ~0u};
  uint64_t rank = warp_max_u64(detail::rank_vectors(row, ranking));
  rank = warp_max_u64(detail::rank_element(row, rank, ranking), Row::kVecSize);
  ptx::cluster_wait();
  if (row.lane_idx == 0) exchange.push(&ranks[2 * row.global_warp()], rank, 0, 0);
  if (row.rank != 0) return;
  exchange.wait();
  if (row.warp_idx != 0) return;
  rank = 0;
  for (uint32_t i = row.lane_idx; i < num_warps; i += 32) rank = max(rank, ranks[2 * i]);
  rank = warp_max_u64(rank);
  if (row.lane_idx == 0) {
    const uint32_t i = ranking.index(rank);
    detail::write_top_k<Traits>(params, row_idx, 0, i,
                                detail::value_of_key(static_cast<uint32_t>(rank >> 32), data + i));
  }
}

#ifndef __CUDACC_RTC__

// `device` is the current one. k is 1, and windows are whole rows.
template <typename Traits>
inline cudaError_t launch_largest(const TopKParams& params, int device, int num_sms,
                                  bool enable_pdl, cudaStream_t stream) {
  using Layout = LargestLayout;
  constexpr auto kKernel = largest_kernel<Traits>;
  // A row may begin inside a vector, and then end in one more.
  const auto num_vecs =
      static_cast<uint32_t>(uint64_t{params.num_cols} * sizeof(typename Traits::T) / 16 + 2);
  const auto launch = [&](uint32_t num_ranks) {
    const uint32_t num_ctas = params.num_rows * num_ranks, vecs = ceil_div(num_vecs, num_ranks);
    const bool few_ctas = num_ctas <= static_cast<uint32_t>(num_sms);
    const uint32_t most = few_ctas ? Layout::kMaxThreads : Layout::kManyThreads;
    return launch_kernel(kKernel, dim3(num_ctas), dim3(std::min(round_up(vecs, 32u), most)), 0,
                         stream, enable_pdl, params, num_ranks > 1 ? num_ranks : 0);
  };
  // So many CTAs that each has its whole part in flight at once, if there may be as many.
  const uint32_t limit = params.max_cluster == 0 ? Layout::kMaxCluster : params.max_cluster;
  uint32_t num_ranks = 1;
  while (num_ranks < Layout::kMaxCluster && 2 * num_ranks <= limit &&
         num_ranks * Layout::kManyThreads * Layout::kInFlight < num_vecs) {
    num_ranks *= 2;
  }
  for (; num_ranks > 1; num_ranks /= 2) {
    int num_clusters = 0;
    cudaError_t status =
        count_active_clusters<kKernel>(device, Layout::kMaxThreads, 0, num_ranks, &num_clusters);
    if (status != cudaSuccess) return status;
    if (num_clusters == 0) continue;
    status = launch(num_ranks);
    if (status == cudaSuccess) return status;
    // A stream that is confined to a part of the device may have less room.
    cudaGetLastError();
  }
  return launch(1);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
