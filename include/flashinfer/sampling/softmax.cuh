// Softmax, in one of two ways that give the same bits: sums of weights per tile of 4096 elements
// (tiles.cuh), then out = weight / total.
//
//   by clusters   a cluster keeps a row in registers and exchanges its tiles' sums
//   by tiles      a CTA per tile reads the row twice. Rows are taken in blocks that stay in L2
//                 between the passes: launch i normalises block i - 1 and sums block i side by side
#pragma once

#include <flashinfer/ptx/cluster_exchange.cuh>
#include <flashinfer/ptx/prefetch.cuh>
#include <flashinfer/sampling/tiles.cuh>

namespace flashinfer {

namespace detail {

// What makes shares of the row of a tile's weights, which are in units of the tile's maximum; NaN
// for a row without distribution.
template <typename Traits>
__device__ __forceinline__ float tile_factor(float row_max, uint64_t row_total, float tile_max,
                                             float scale) {
  const typename Traits::Weight weight(row_max, scale);
  const bool valid = has_distribution<Traits::kLogits>(row_max) && scale >= 0.f;
  return valid ? weight.scale() / static_cast<float>(row_total) * weight.relative(tile_max)
               : __uint_as_float(0x7fc00000u);
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
    const uint32_t at = first + i * kThreads * kVecSize;
    if (out_aligned && at + kVecSize <= params.vocab_size) {
      Vector<TOut, kVecSize> packed;
      packed.from_floats(y);
      packed.store(out + at);
    } else {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        if (at + j < params.vocab_size) out[at + j] = from_float<TOut>(y[j]);
      }
    }
  }
}

}  // namespace detail

// Grid (tiles, 2 * rows of a block), kTileThreads threads: odd rows of the grid normalise the block
// at first_row, even ones sum the block behind it.
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

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kSoftmaxThreadsPerSm = 1024;  // sm_75 has no more
#else
constexpr int kSoftmaxThreadsPerSm = 1280;
#endif

}  // namespace detail

// One cluster per row, whose CTAs keep it in registers: 32 elements per thread, a tile per 128
// threads. Sums are those of softmax_kernel, bit for bit.
template <typename Traits, int kThreads>
__global__ void __launch_bounds__(kThreads, detail::kSoftmaxThreadsPerSm / kThreads)
    softmax_cluster_kernel(const __grid_constant__ SamplingParams params) {
  using T = typename Traits::T;
  using TOut = typename Traits::TOut;
  using Weight = typename Traits::Weight;
  constexpr int kVecSize = 16 / sizeof(T);
  constexpr int kPerTile = 128, kVecs = StreamLayout::kTileSize / kPerTile / kVecSize;
  constexpr uint32_t kTiles = kThreads / kPerTile, kMaxTiles = 32;
  __shared__ float warp_max[kThreads / 32], tile_max[kTiles];
  __shared__ uint64_t warp_sum[kThreads / 32];
  __shared__ __align__(16) TileStat stats[kMaxTiles];
  __shared__ ptx::ClusterExchange exchange;
  const uint32_t num_ranks = ptx::cluster_size(), rank = ptx::cluster_rank();
  if (threadIdx.x == 0) exchange.init(num_ranks * kTiles * sizeof(TileStat));
  // The other CTAs may be written to once they run: waited for before the exchange.
  ptx::cluster_arrive();
  const uint32_t row_idx = blockIdx.x / num_ranks;
  const uint32_t warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
  const uint32_t tile = rank * kTiles + threadIdx.x / kPerTile;
  const uint32_t first = tile * StreamLayout::kTileSize + threadIdx.x % kPerTile * kVecSize;
  const T* row = static_cast<const T*>(params.input) + row_idx * params.input_stride;
  TOut* out = static_cast<TOut*>(params.out) + row_idx * params.out_stride;
  const bool aligned = detail::row_is_aligned(row), out_aligned = detail::row_is_aligned(out);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  float x[kVecs][kVecSize];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    detail::load_elements(row, aligned, params.vocab_size, first + i * kPerTile * kVecSize, x[i]);
  }
  if (threadIdx.x == 0 && params.rows_ahead != 0 && row_idx + params.rows_ahead < params.num_rows) {
    // The row that will be worked on here next; memory is read while this one is exchanged and
    // written.
    constexpr uint32_t kMine = kTiles * StreamLayout::kTileSize;
    const T* next = row + params.rows_ahead * params.input_stride + rank * kMine;
    const uint32_t size = min(kMine, params.vocab_size - min(rank * kMine, params.vocab_size));
    if (detail::row_is_aligned(next)) ptx::prefetch_bulk_l2(next, size * sizeof(T) / 16 * 16);
  }
  const float scale = detail::inv_temperature<Traits>(params, row_idx);
  float max = negative_infinity();
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) max = detail::max_nan(max, x[i][j]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    max = detail::max_nan(max, __shfl_xor_sync(0xffffffffu, max, offset));
  }
  if (lane_idx == 0) warp_max[warp_idx] = max;
  __syncthreads();
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w) max = detail::max_nan(max, warp_max[warp_idx / 4 * 4 + w]);
  {
    const Weight weight(max, scale);
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        x[i][j] = weight.to_float(x[i][j]);
        sum += weight.to_fixed(x[i][j]);
      }
    }
    sum = warp_sum_u64(sum);
    if (lane_idx == 0) {
      warp_sum[warp_idx] = sum;
      if (warp_idx % 4 == 0) tile_max[warp_idx / 4] = max;
    }
  }
  __syncthreads();
  ptx::cluster_wait();
  if (threadIdx.x < num_ranks * kTiles) {
    const uint32_t mine = threadIdx.x % kTiles, to = threadIdx.x / kTiles;
    uint64_t sum = 0;
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) sum += warp_sum[4 * mine + w];
    exchange.push(&stats[rank * kTiles + mine], sum, __float_as_uint(tile_max[mine]), to);
  }
  exchange.wait();

  detail::TileSums<Weight, kMaxTiles> tiles;
  tiles.load(stats, num_ranks * kTiles, scale);
  const float factor = detail::tile_factor<Traits>(tiles.max, tiles.total, max, scale);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    float y[kVecSize];
#pragma unroll
    for (int j = 0; j < kVecSize; ++j) y[j] = x[i][j] * factor;
    const uint32_t at = first + i * kPerTile * kVecSize;
    if (out_aligned && at + kVecSize <= params.vocab_size) {
      Vector<TOut, kVecSize> packed;
      packed.from_floats(y);
      packed.store(out + at);
    } else {
#pragma unroll
      for (int j = 0; j < kVecSize; ++j) {
        if (at + j < params.vocab_size) out[at + j] = from_float<TOut>(y[j]);
      }
    }
  }
}

#ifndef __CUDACC_RTC__

namespace detail {

constexpr int kSoftmaxThreads = 256;

// How many clusters of `num_ranks` CTAs run at a time on the current device; 0: none can.
template <typename Traits>
inline cudaError_t softmax_clusters(int device, uint32_t num_ranks, int* num_clusters) {
  // A race between threads writes the same values twice.
  constexpr int kMaxDevices = 64, kMaxRanks = 16, kUnknown = 0;
  static int known[kMaxDevices][kMaxRanks + 1] = {};
  *num_clusters = 0;
  if (device < 0 || device >= kMaxDevices || num_ranks > kMaxRanks) return cudaSuccess;
  int& entry = known[device][num_ranks];
  if (entry == kUnknown) {
    int count = 0;
    const auto function =
        reinterpret_cast<const void*>(softmax_cluster_kernel<Traits, kSoftmaxThreads>);
    int major = 0;
    cudaError_t status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status != cudaSuccess) return status;
    if (major >= 9) {
      status = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (status != cudaSuccess) return status;
      cudaLaunchAttribute attribute;
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = num_ranks;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(num_ranks);
      config.blockDim = dim3(kSoftmaxThreads);
      config.attrs = &attribute;
      config.numAttrs = 1;
      if (cudaOccupancyMaxActiveClusters(&count, function, &config) != cudaSuccess) {
        cudaGetLastError();
        count = 0;
      }
    }
    entry = count > 0 ? count : -1;
  }
  *num_clusters = entry > 0 ? entry : 0;
  return cudaSuccess;
}

// Two kernels, or one that does both for two blocks, where a cluster cannot hold a row.
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

// Rows of 128256 float32 on an H200, 4, 64 and 256 of them, by clusters of 16 CTAs of 256 threads,
// five to a multiprocessor: 4.5, 22.4 and 73 us, of which prefetching rows gains 2; four to a
// multiprocessor 4.4, 22.6 and 76; of 8 CTAs of 512 threads 5.6, 24 and 78; with the row in shared
// memory 31 and 92; by tiles 3.4 for one row, 26.5 and 101. Without the exchange it would be 64.
template <typename Traits>
inline cudaError_t launch_softmax(SamplingParams params, int device, bool enable_pdl,
                                  cudaStream_t stream) {
  constexpr uint32_t kElementsPerCta = 32 * detail::kSoftmaxThreads;
  const uint32_t num_ranks = ceil_div(params.vocab_size, kElementsPerCta);
  int num_clusters = 0;
  const bool is_single = params.num_rows < 4 && num_ranks > 4;
  if (!is_single) {
    const cudaError_t status = detail::softmax_clusters<Traits>(device, num_ranks, &num_clusters);
    if (status != cudaSuccess) return status;
  }
  if (num_clusters == 0) return detail::launch_softmax_by_tiles<Traits>(params, enable_pdl, stream);
  params.rows_ahead = num_clusters * 2 / 5;
  const cudaError_t status = launch_kernel(
      softmax_cluster_kernel<Traits, detail::kSoftmaxThreads>, dim3(params.num_rows * num_ranks),
      dim3(detail::kSoftmaxThreads), 0, stream, enable_pdl, params, num_ranks);
  if (status == cudaSuccess) return status;
  // A part of the device, which the stream is confined to, may have less room than was asked for.
  cudaGetLastError();
  return detail::launch_softmax_by_tiles<Traits>(params, enable_pdl, stream);
}

#endif  // __CUDACC_RTC__

}  // namespace flashinfer
