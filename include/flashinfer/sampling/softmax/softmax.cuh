// Softmax, in one of two ways that give the same bits: sums of weights per tile of 4096 elements
// (row/tiles.cuh), then out = weight / total.
//
//   by clusters   a cluster keeps a row in registers and exchanges its tiles' sums
//   by tiles      a CTA per tile reads the row twice. Rows are taken in blocks that stay in L2
//                 between the passes: launch i normalises block i - 1 and sums block i side by side
//
// Measurements, also of what lost: docs/tuning/sampling.md.
#pragma once

#include <flashinfer/ptx/cache_hint.cuh>
#include <flashinfer/ptx/cluster_exchange.cuh>
#include <flashinfer/ptx/cp_async.cuh>
#include <flashinfer/ptx/prefetch.cuh>
#include <flashinfer/sampling/row/tiles.cuh>

#ifndef __CUDACC_RTC__
#include <algorithm>
#endif

namespace flashinfer {

namespace detail {

// Factor that turns a tile's weights, in units of the tile's maximum, into shares of the row; NaN
// for a row without a distribution.
template <typename Traits>
__device__ __forceinline__ float tile_factor(float row_max, uint64_t row_total, float tile_max,
                                             float scale) {
  const typename Traits::Weight weight(row_max, scale);
  const bool valid = has_distribution<Traits::kLogits>(row_max) && scale >= 0.f;
  return valid ? weight.scale() / static_cast<float>(row_total) * weight.relative(tile_max)
               : __uint_as_float(0x7fc00000u);
}

// With kHasPolicy, `policy` comes from ptx::l2_policy.
template <bool kHasPolicy, int N, typename TOut>
__device__ __forceinline__ void store_elements(TOut* out, bool aligned, uint32_t size,
                                               uint32_t first, const float (&y)[N],
                                               uint64_t policy = 0) {
  if (aligned && first + N <= size) {
    Vector<TOut, N> packed;
    packed.from_floats(y);
    if constexpr (kHasPolicy) {
#pragma unroll
      for (int i = 0; i < packed.kNumAccesses; ++i) {
        ptx::store_16(reinterpret_cast<uint4*>(out + first) + i, packed.words[i], policy);
      }
    } else {
      packed.store(out + first);
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (first + j < size) out[first + j] = from_float<TOut>(y[j]);
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void normalise_tile(const SamplingParams& params, uint32_t row_idx,
                                               uint32_t tile, uint32_t num_tiles) {
  using T = typename Traits::T;
  using TOut = typename Traits::TOut;
  constexpr int kThreads = kTileThreads<Traits>, kVecSize = 16 / sizeof(T);
  constexpr int kVecs = StreamLayout::kTileSize / kThreads / kVecSize;
  const T* row = static_cast<const T*>(params.input) + row_idx * params.input_stride;
  TOut* out = static_cast<TOut*>(params.out) + row_idx * params.out_stride;
  const bool aligned = row_is_aligned(row), out_aligned = row_is_aligned(out);
  const uint32_t first = tile * StreamLayout::kTileSize + threadIdx.x * kVecSize;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  float x[kVecs][kVecSize];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    load_elements(row, aligned, params.vocab_size, first + i * kThreads * kVecSize, x[i]);
  }
  const float scale = inv_temperature<Traits>(params, row_idx);
  TileSums<typename Traits::Weight> tiles;
  const auto* stats =
      static_cast<const TileStat*>(params.workspace) + uint64_t{row_idx} * num_tiles;
  tiles.load(stats, num_tiles, scale);
  const float tile_max = stats[tile].max;
  const typename Traits::Weight weight(tile_max, scale);
  const float factor = tile_factor<Traits>(tiles.max, tiles.total, tile_max, scale);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    float y[kVecSize];
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) y[j] = weight.to_float(x[i][j]) * factor;
    detail::store_elements<false>(out, out_aligned, params.vocab_size,
                                  first + i * kThreads * kVecSize, y);
  }
}

}  // namespace detail

// Grid (tiles, 2 * rows of a block), kTileThreads threads: odd rows of the grid normalise the block
// at first_row, even ones sum the block after it.
template <typename Traits>
__global__ void __launch_bounds__(kTileThreads<Traits>)
    softmax_kernel(const __grid_constant__ SamplingParams params) {
  const uint32_t block_rows = gridDim.y / 2, row = blockIdx.y / 2;
  const uint32_t sums_from = params.first_row < 0 ? 0 : params.first_row + block_rows;
  if (blockIdx.y % 2 == 0) {
    if (sums_from + row >= params.num_rows) return;
    detail::sum_tile<Traits>(params, sums_from + row, blockIdx.x, gridDim.x);
  } else {
    if (params.first_row < 0 || params.first_row + row >= params.num_rows) return;
    detail::normalise_tile<Traits>(params, params.first_row + row, blockIdx.x, gridDim.x);
  }
}

namespace detail {

// Copies one vector of 16 bytes to shared memory; -inf after the row's end.
template <typename T>
__device__ __forceinline__ void load_to_shared(float4* slot, const T* row, bool aligned,
                                               uint32_t size, uint32_t first) {
  constexpr int kVecSize = 16 / sizeof(T);
  if (aligned && first + kVecSize <= size) {
    ptx::cp_async_16(ptx::shared_address(slot), row + first, true);
  } else {
    float x[kVecSize];
    load_elements(row, false, size, first, x);
    Vector<T, kVecSize> vec;
    vec.from_floats(x);
    vec.store(reinterpret_cast<T*>(slot));
  }
}

}  // namespace detail

// How softmax_cluster_kernel divides a row. Each thread keeps some elements in registers and the
// others in shared memory, so that an SM can hold as many threads as possible.
struct SoftmaxSplit {
  static constexpr int kThreads = 256, kPerThread = 32, kInRegisters = 8;
  static constexpr uint32_t kElementsPerCta = kPerThread * kThreads;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100
  static constexpr int kCtasPerSm = 8;
#else
  static constexpr int kCtasPerSm = 4;  // fits SMs of 1024 or 1536 threads
#endif
};

// One cluster per row, whose CTAs keep the row until its sum is known. Sums equal those of
// softmax_kernel bit for bit.
template <typename Traits>
__global__ void __launch_bounds__(SoftmaxSplit::kThreads, SoftmaxSplit::kCtasPerSm)
    softmax_cluster_kernel(const __grid_constant__ SamplingParams params) {
#if __CUDA_ARCH__ >= 900
  using T = typename Traits::T;
  using TOut = typename Traits::TOut;
  using Weight = typename Traits::Weight;
  using Split = SoftmaxSplit;
  constexpr int kThreads = Split::kThreads, kVecSize = 16 / sizeof(T), kQuads = kVecSize / 4;
  constexpr int kPerTile = StreamLayout::kTileSize / Split::kPerThread,
                kWarpsPerTile = kPerTile / 32;
  constexpr int kOwnVecs = Split::kInRegisters / kVecSize;
  constexpr int kSharedVecs = Split::kPerThread / kVecSize - kOwnVecs;
  constexpr uint32_t kTiles = kThreads / kPerTile, kMaxTiles = 16 * kTiles,
                     kStep = kPerTile * kVecSize;
  // Each thread has a column: first its vectors as loaded, then its weights.
  __shared__ float4 kept[kSharedVecs * kQuads][kThreads];
  __shared__ float warp_max[kThreads / 32], tile_max[kTiles];
  __shared__ uint64_t warp_sum[kThreads / 32];
  __shared__ __align__(16) TileStat stats[kMaxTiles];
  __shared__ ptx::ClusterExchange exchange;
  const uint32_t num_ranks = ptx::cluster_size(), rank = ptx::cluster_rank();
  if (threadIdx.x == 0) exchange.init(num_ranks * kTiles * sizeof(TileStat));
  // Other CTAs may be written to only once they run; the matching wait follows before the exchange.
  ptx::cluster_arrive();
  const uint32_t row_idx = ptx::cluster_index();
  const uint32_t warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
  const uint32_t own_tile = threadIdx.x / kPerTile;
  const uint32_t first =
      (rank * kTiles + own_tile) * StreamLayout::kTileSize + threadIdx.x % kPerTile * kVecSize;
  const T* row = static_cast<const T*>(params.input) + row_idx * params.input_stride;
  TOut* out = static_cast<TOut*>(params.out) + row_idx * params.out_stride;
  const bool aligned = detail::row_is_aligned(row), out_aligned = detail::row_is_aligned(out);
  if (threadIdx.x == 0 && row_idx < params.early_rows) {
    constexpr uint32_t kMine = Split::kElementsPerCta;
    const uint32_t bytes = min(kMine, params.vocab_size - rank * kMine) * sizeof(T) / 16 * 16;
    if (aligned && bytes != 0) ptx::prefetch_bulk_l2(row + rank * kMine, bytes);
  }
  ptx::grid_dependency_wait();
  if (params.num_rows <= params.paced_rows) ptx::grid_launch_dependents();
  if (row_idx < params.paced_rows) {
    // The delay lets some rows be read while others are exchanged or written.
    const uint32_t start = clock(), delay = row_idx * params.pace -
                                            min(row_idx, params.early_rows) * params.pace / 2;
    while (static_cast<uint32_t>(clock()) - start < delay) continue;
  }

#pragma unroll
  for (int i = 0; i < kSharedVecs; ++i) {
    detail::load_to_shared(&kept[i * kQuads][threadIdx.x], row, aligned, params.vocab_size,
                           first + (kOwnVecs + i) * kStep);
  }
  ptx::cp_async_commit();
  float x[kOwnVecs][kVecSize];
#pragma unroll
  for (int i = 0; i < kOwnVecs; ++i) {
    detail::load_elements(row, aligned, params.vocab_size, first + i * kStep, x[i]);
  }
  const auto load_kept = [&](int i, float (&y)[kVecSize]) {
    Vector<T, kVecSize> vec;
    vec.load(reinterpret_cast<const T*>(&kept[i * kQuads][threadIdx.x]));
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) y[j] = vec[j];
  };
  const float scale = detail::inv_temperature<Traits>(params, row_idx);
  float max = negative_infinity();
#pragma unroll
  for (int i = 0; i < kOwnVecs; ++i) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) max = detail::max_nan(max, x[i][j]);
  }
  ptx::cp_async_wait<0>();
#pragma unroll
  for (int i = 0; i < kSharedVecs; ++i) {
    float y[kVecSize];
    load_kept(i, y);
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) max = detail::max_nan(max, y[j]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    max = detail::max_nan(max, __shfl_xor_sync(0xffffffffu, max, offset));
  }
  if (lane_idx == 0) warp_max[warp_idx] = max;
  __syncthreads();
#pragma unroll
  for (uint32_t w = 0; w < kWarpsPerTile; ++w) {
    max = detail::max_nan(max, warp_max[own_tile * kWarpsPerTile + w]);
  }
  {
    const Weight weight(max, scale);
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kOwnVecs; ++i) {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        x[i][j] = weight.to_float(x[i][j]);
        sum += weight.to_fixed(x[i][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kSharedVecs; ++i) {
      float y[kVecSize];
      load_kept(i, y);
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        y[j] = weight.to_float(y[j]);
        sum += weight.to_fixed(y[j]);
      }
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        kept[i * kQuads + q][threadIdx.x] = {y[4 * q], y[4 * q + 1], y[4 * q + 2], y[4 * q + 3]};
      }
    }
    sum = warp_sum_u64(sum);
    if (lane_idx == 0) {
      warp_sum[warp_idx] = sum;
      if (warp_idx % kWarpsPerTile == 0) tile_max[own_tile] = max;
    }
  }
  // The next grid may start once the last rows are read: its early fetches would delay them.
  ptx::grid_launch_dependents();
  __syncthreads();
  ptx::cluster_wait();
  if (threadIdx.x < num_ranks * kTiles) {
    const uint32_t tile = threadIdx.x % kTiles, to = threadIdx.x / kTiles;
    uint64_t sum = 0;
#pragma unroll
    for (uint32_t w = 0; w < kWarpsPerTile; ++w) sum += warp_sum[kWarpsPerTile * tile + w];
    exchange.push(&stats[rank * kTiles + tile], sum, __float_as_uint(tile_max[tile]), to);
  }
  exchange.wait();

  detail::TileSums<Weight, kMaxTiles> tiles;
  tiles.load(stats, num_ranks * kTiles, scale);
  const float factor = detail::tile_factor<Traits>(tiles.max, tiles.total, max, scale);
  const uint64_t policy = ptx::l2_policy(row_idx < params.kept_rows);
#pragma unroll
  for (int i = 0; i < kOwnVecs; ++i) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) x[i][j] *= factor;
    detail::store_elements<true>(out, out_aligned, params.vocab_size, first + i * kStep, x[i],
                                 policy);
  }
#pragma unroll
  for (int i = 0; i < kSharedVecs; ++i) {
    float y[kVecSize];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float4 quad = kept[i * kQuads + q][threadIdx.x];
      y[4 * q] = quad.x * factor;
      y[4 * q + 1] = quad.y * factor;
      y[4 * q + 2] = quad.z * factor;
      y[4 * q + 3] = quad.w * factor;
    }
    detail::store_elements<true>(out, out_aligned, params.vocab_size,
                                 first + (kOwnVecs + i) * kStep, y, policy);
  }
#endif
}

#ifndef __CUDACC_RTC__

namespace detail {

// Softmax by tiles, for rows that do not fit in a cluster. Each launch sums one block of rows and
// normalises the block before it.
template <typename Traits>
inline cudaError_t launch_softmax_by_tiles(SamplingParams params, bool enable_pdl,
                                           cudaStream_t stream) {
  constexpr uint64_t kBlockBytes = 34 << 20;
  const uint64_t row_bytes = uint64_t{params.vocab_size} * sizeof(typename Traits::T);
  const uint64_t fitting = kBlockBytes / row_bytes;
  uint64_t block_rows = fitting < 1 ? 1 : fitting > 32767 ? 32767 : fitting;
  if (block_rows > params.num_rows) block_rows = params.num_rows;
  const dim3 grid(StreamLayout::num_tiles(params.vocab_size),
                  2 * static_cast<uint32_t>(block_rows));
  const int64_t num_rows = params.num_rows;
  for (int64_t row = -static_cast<int64_t>(block_rows); row < num_rows; row += block_rows) {
    params.first_row = row < 0 ? -1 : row;
    const cudaError_t status = launch_kernel(
        softmax_kernel<Traits>, grid, dim3(kTileThreads<Traits>), 0, stream, enable_pdl, params);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace detail

// Chooses between clusters and tiles, and sets how rows are paced, fetched early and kept in L2.
template <typename Traits>
inline cudaError_t launch_softmax(SamplingParams params, int device, bool enable_pdl,
                                  cudaStream_t stream) {
  using Split = SoftmaxSplit;
  constexpr auto kKernel = softmax_cluster_kernel<Traits>;
  const uint32_t num_ranks = ceil_div(params.vocab_size, Split::kElementsPerCta);
  int num_clusters = 0;
  const bool is_single = params.num_rows < 4 && num_ranks > 4;
  if (!is_single) {
    const cudaError_t status =
        count_active_clusters<kKernel>(device, Split::kThreads, 0, num_ranks, &num_clusters);
    if (status != cudaSuccess) return status;
  }
  if (num_clusters == 0) return detail::launch_softmax_by_tiles<Traits>(params, enable_pdl, stream);
  // Rows start at the speed of memory: 4 KiB read or written per cycle of 2 GHz. This is twice the
  // real speed, since the first rows are only read for a while. Rows that are in L2 by then start
  // at twice the pace.
  constexpr uint32_t kBytesPerCycle = 4096;
  constexpr size_t kBytes = sizeof(typename Traits::T) + sizeof(typename Traits::TOut);
  params.paced_rows = static_cast<uint32_t>(num_clusters);
  params.pace = static_cast<uint32_t>(params.vocab_size * kBytes / kBytesPerCycle);
  // These bytes are read before the preceding grid has ended.
  constexpr uint32_t kEarlyBytes = 8 << 20;
  params.early_rows =
      std::min(kEarlyBytes / static_cast<uint32_t>(params.vocab_size * sizeof(typename Traits::T)),
               params.paced_rows);
  // Output of the first rows stays in L2 while the rest passes through. A reader finds it there,
  // and a buffer that is rewritten again and again does not go to memory each time.
  constexpr uint32_t kKeptBytes = 12 << 20;
  params.kept_rows =
      kKeptBytes / static_cast<uint32_t>(params.vocab_size * sizeof(typename Traits::TOut));
  const cudaError_t status =
      launch_kernel(kKernel, dim3(params.num_rows * num_ranks), dim3(Split::kThreads), 0, stream,
                    enable_pdl, params, num_ranks);
  if (status == cudaSuccess) return status;
  // A stream that is confined to a part of the device may have less room than requested.
  cudaGetLastError();
  return detail::launch_softmax_by_tiles<Traits>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
